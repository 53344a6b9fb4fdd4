"""Corpus, tokenizer, training and exam of the demo model. The source tree contains this package, but the wheel does not."""
