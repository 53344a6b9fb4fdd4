"""llama.cpp's own API: completions, filling in the middle, templates, and descriptions of the server."""
