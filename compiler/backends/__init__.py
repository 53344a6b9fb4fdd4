"""Back ends: one folder per kind of machine, each with its own pipeline, schedules and code generation."""
