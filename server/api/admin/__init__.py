"""The administration API, under its own paths and under the paths of Triton and llama.cpp."""
