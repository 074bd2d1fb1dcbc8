"""Prints a plan as Python code: the text of each generated file, and its template. All decisions are in the plan."""
