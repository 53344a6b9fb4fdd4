"""From the tokens of a request to the body of its answer, streamed or whole."""
