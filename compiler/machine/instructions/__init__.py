"""Instructions of the dot tiles, one file per instruction set."""
