"""The operators of products of matrices, in floats and integers, and of the quantised weights that they take."""
