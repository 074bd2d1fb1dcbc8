"""Reports about plans: pictures, tables, proofs, and what changed since a revision."""
