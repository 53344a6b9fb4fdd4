"""GGUF files: the container, its block formats, and the model and the tokenizer inside."""
