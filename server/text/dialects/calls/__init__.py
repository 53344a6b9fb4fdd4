"""Syntaxes of calls. Each syntax has a parser and a grammar, and may be shared by several formats, which set its fields to other values."""
