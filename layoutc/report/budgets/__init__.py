"""Reports of model budgets: figures, tables, CSV, and charts drawn from the JSON."""
