"""Passes that all back ends share. Each maps a program to a program."""
