"""The instructions that targets bring for the dot tiles, a file per instruction set."""
