"""What a plan means, for people: pictures, tables, proofs, and what changed since a revision."""
