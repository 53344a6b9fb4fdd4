"""The server: APIs, models, workers and the engine, from HTTP requests to tokens and back."""
