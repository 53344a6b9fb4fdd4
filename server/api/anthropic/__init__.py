"""Anthropic's API: /v1/messages and counting of tokens."""
