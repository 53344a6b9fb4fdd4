"""How models write: thoughts, tool calls and text of an answer. `formats` has one file per written format; see `format.py` first."""
