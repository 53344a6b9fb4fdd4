"""Models in a form that runs without Python: in a browser, in Node, or linked to a program in C."""
