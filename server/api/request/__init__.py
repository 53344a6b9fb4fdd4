"""Turn the body of a request into a Submit for the worker: schemas, limits, defaults, prompts."""
