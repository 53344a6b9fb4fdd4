"""Lower a planned program to what the virtual machine runs: instructions, the shape heap, kernel launches."""
