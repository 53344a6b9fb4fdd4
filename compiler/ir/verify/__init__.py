"""The verifier: checks that a program keeps the rules of the IR."""
