"""Back ends: a folder per kind of machine, with its own pipeline, schedules and code generation."""
