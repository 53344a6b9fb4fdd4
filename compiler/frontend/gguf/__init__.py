"""GGUF files: the container, the formats of quantised blocks, and the model and the tokenizer in a file."""
