"""Passes that all back ends share. Each pass maps a program to a program."""
