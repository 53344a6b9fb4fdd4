"""The attention operators, and the operators of the KV cache."""
