"""The passes that all back ends share, from one program to another."""
