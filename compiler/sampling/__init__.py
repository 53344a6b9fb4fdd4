"""The definition of sampling in NumPy. This package imports no operators, so engines without a compiler can use it to sample."""
