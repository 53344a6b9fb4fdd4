"""The causal families by the name that config.json gives them."""

from compiler.frontend.decoder import Wiring
from compiler.frontend.models import gemma2, gemma3_text, llama, mistral, phi3, qwen2, qwen3

CAUSAL: dict[str, Wiring] = {
    "llama": llama.WIRING,
    "mistral": mistral.WIRING,
    "qwen2": qwen2.WIRING,
    "qwen3": qwen3.WIRING,
    "gemma2": gemma2.WIRING,
    "gemma3_text": gemma3_text.WIRING,
    "phi3": phi3.WIRING,
}
