"""The operators that draw tokens from logits."""
