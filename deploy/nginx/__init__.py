"""The example configuration for nginx, and the command that writes the paths of the administration into it."""
