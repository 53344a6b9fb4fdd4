"""The virtual machine: instructions, argument checks, and captured regions."""
