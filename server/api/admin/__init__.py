"""The administration: in its own words, and under the names of Triton and llama.cpp."""
