"""How the demo model was made: its corpus, its tokenizer, its training and its exam. Part of the source tree, not of the wheel."""
