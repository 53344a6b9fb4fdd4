"""Programs as text: the printers and the parsers."""
