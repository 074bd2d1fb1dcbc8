"""A plan as Python text: one view for each generated file, and the templates that place them. Decides nothing."""
