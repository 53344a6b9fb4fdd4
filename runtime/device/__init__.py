"""Devices: the protocol, and a folder for each kind."""
