"""Budgets of models for people: figures, tables, CSV, and charts that are drawn from the JSON."""
