"""Compile model files to executables: front end, passes, back ends."""
