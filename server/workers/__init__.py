"""The worker processes of models: starting, supervising, replacing them without losing a request."""
