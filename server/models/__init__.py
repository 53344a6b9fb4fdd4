"""The models of a server: loading, aliases, memory budget, admission, operations."""
