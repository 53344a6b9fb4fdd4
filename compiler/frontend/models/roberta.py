"""RoBERTa and XLM-RoBERTa: BERT with positions counted from the padding token's id."""

from compiler.frontend.encoder import EncoderWiring

WIRING = EncoderWiring(prefix="roberta.")
