"""Graph passes that only the CUDA back end runs."""
