"""The meaning of sampling in NumPy. It imports no operators, so engines without a compiler can sample, too."""
