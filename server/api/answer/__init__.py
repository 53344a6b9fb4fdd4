"""Turn the tokens of a request into the body of its answer, streamed or whole."""
