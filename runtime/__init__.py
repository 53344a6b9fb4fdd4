"""Run executables: the format of what can be run, the virtual machine, devices and memory."""
