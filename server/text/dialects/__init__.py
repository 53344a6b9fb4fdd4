"""Read and constrain answers as models write them: thoughts, tool calls and text. `formats/table.py` has a line for each written
format, and `formats/harmony.py` the one that is no such line; see `format.py` first."""
