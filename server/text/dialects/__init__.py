"""Read and constrain answers as models write them: thoughts, tool calls and text. `formats` has one file per written format; see
`format.py` first."""
