"""llama.cpp's own API: completions, filling in the middle, templates, and descriptions of its server."""
