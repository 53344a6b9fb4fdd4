"""Chat templates, the sandbox that confines them, and the process that compiles and renders templates from outside, such as a model's
file."""
