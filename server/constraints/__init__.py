"""Constraints on the tokens that a sequence may continue with: grammars, schemas, banned tokens."""
