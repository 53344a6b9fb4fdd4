"""Convert vocabularies in other formats to the content of tokenizer.json."""
