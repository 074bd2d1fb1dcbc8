"""Reports about a plan for people: pictures, tables, proofs, and what changed since a revision."""
