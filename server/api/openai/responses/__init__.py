"""OpenAI's /v1/responses."""
