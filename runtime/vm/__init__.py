"""The virtual machine: its instructions, checks of arguments, and captured regions."""
