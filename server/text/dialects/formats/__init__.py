"""How each format is written: the table of those with markers around calls and thoughts, and harmony."""
