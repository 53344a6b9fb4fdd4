"""The worker processes of models: start and supervise them, and replace them without losing a request."""
