"""Ways to write calls that several formats share: each has a parser and a grammar, and formats differ in its fields."""
