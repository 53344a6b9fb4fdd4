"""Model files to executables: front end, passes, back ends."""
