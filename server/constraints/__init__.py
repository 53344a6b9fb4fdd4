"""Constraints on what a sequence may say next: grammars, schemas, banned tokens."""
