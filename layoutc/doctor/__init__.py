"""What `layoutc doctor` looks at: packages, cards, what of FSDP2 the runtime reads, and what recipes run as here."""
