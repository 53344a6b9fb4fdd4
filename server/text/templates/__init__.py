"""Chat templates in a sandbox, and the process for slow renderings."""
