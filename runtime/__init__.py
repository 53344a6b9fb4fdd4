"""Executables at work: the formats of what can be run, the virtual machine, devices and memory."""
