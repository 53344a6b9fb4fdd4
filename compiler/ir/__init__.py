"""The intermediate representation: nodes of both levels, their types, dimensions, text and rules."""
