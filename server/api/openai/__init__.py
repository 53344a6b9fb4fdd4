"""OpenAI's API under /v1."""
