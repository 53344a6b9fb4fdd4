"""vLLM's own API: generation from token ids, without text."""
