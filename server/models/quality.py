"""Write a quality label in words."""

from __future__ import annotations

from server.messages import QualityLabel

LEAST = 1e-8  # a KL divergence up to LEAST comes only from the order of sums, and is written as 0
POOR = 200.0  # if exact weights have a higher perplexity, the model does not know the text's languages, or its file is damaged


def in_words(label: QualityLabel) -> str:
    """Return the figures of a label in one line."""
    found = f"KL {divergence_of(label)}, top-1 {label.top1_agreement:.1%}, perplexity {label.perplexity:.4g}"
    exact = f"{label.exact_perplexity:.4g} with exact weights"
    why = "; the file may be damaged, or the model does not know such text" if label.exact_perplexity > POOR else ""
    return f"{found} ({exact}{why}), over {label.num_tokens:,} tokens"


def divergence_of(label: QualityLabel) -> str:
    """Return the KL divergence of a label as text: 0 up to LEAST."""
    return f"{label.kl_divergence:.1e}" if label.kl_divergence > LEAST else "0"
