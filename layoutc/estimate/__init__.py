"""How long a training step takes on more ranks and other links than were measured: pure functions of sizes."""
