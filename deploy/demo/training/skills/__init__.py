"""What the demo model can do, one skill a file; each offers functions from a random generator to a `Turn`."""
