"""From the body of a request to what the engine is asked: schemas, limits, defaults, prompts."""
