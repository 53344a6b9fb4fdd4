"""Turn the body of a request into a job for the worker: check fields and limits, apply defaults, and encode prompts."""
