"""llama.cpp's own API: completions, filling in the middle, templates, and what its server tells about itself."""
