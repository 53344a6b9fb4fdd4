"""The operators that sample tokens from logits."""
