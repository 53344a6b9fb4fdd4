"""Export models in forms that run without Python: in a browser, in Node, or linked into a C program."""
