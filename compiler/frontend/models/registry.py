"""The families by the name that config.json gives them."""

from compiler.frontend.decoder import Wiring
from compiler.frontend.encoder import EncoderWiring
from compiler.frontend.models import bert, gemma2, gemma3_text, llama, mistral, mpnet, phi3, qwen2, qwen3, roberta

CAUSAL: dict[str, Wiring] = {
    "llama": llama.WIRING,
    "mistral": mistral.WIRING,
    "qwen2": qwen2.WIRING,
    "qwen3": qwen3.WIRING,
    "gemma2": gemma2.WIRING,
    "gemma3_text": gemma3_text.WIRING,
    "phi3": phi3.WIRING,
}

ENCODERS: dict[str, EncoderWiring] = {
    "bert": bert.WIRING,
    "roberta": roberta.WIRING,  # and XLM-RoBERTa
    "mpnet": mpnet.WIRING,
}
