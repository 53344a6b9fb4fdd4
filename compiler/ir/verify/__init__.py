"""The verifier: checks that a program follows the rules of the IR."""
