"""One module per written format. Its `FORMAT` says everything about it; `server/text/dialects/registry.py` finds it."""
