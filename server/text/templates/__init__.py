"""Chat templates, the sandbox that confines them, and the process that compiles and renders those from outside."""
