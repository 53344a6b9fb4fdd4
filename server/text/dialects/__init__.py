"""Read and constrain answers as models write them: thoughts, tool calls and text. `formats/harmony.py` has the format of gpt-oss, and
`formats/table.py` has an entry for each other format; see `format.py` first."""
