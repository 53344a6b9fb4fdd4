"""Chat templates in a sandbox, and the process that renders the slow ones."""
