"""HTTP requests to tokens and back: APIs, models, workers, the engine."""
