"""What is said about a spec: findings, their codes, and how they are printed. Imports nothing of layoutc."""
