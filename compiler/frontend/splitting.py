"""Cut the layers of a decoder into stages, which different processes compute one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import prefix_of_decoder
from compiler.frontend.errors import ModelError
from compiler.frontend.registry import decoder_family
from compiler.frontend.weights import TensorInfo


class CannotSplit(ModelError):
    """Raised if a model cannot be computed in this number of stages."""


def require_splittable(config: ModelConfig, num_stages: int) -> None:
    """Raise CannotSplit if the model is of a kind without stages, such as an encoder, if later layers read more than the residual stream of
    earlier ones, or if there are more stages than layers."""
    family = None if not config.is_causal else decoder_family(config.family)
    obstacles = {
        **config.beyond_text,
        "embeds each token once per layer": family is not None and family.layer_inputs is not None and config.layer_inputs is not None,
        "has several residual streams": family is not None and family.widen is not None,
        "has layers that read the keys and values of other layers": any(n != source for n, source in enumerate(config.kv_sources)),
    }
    if reason := next((reason for reason, applies in obstacles.items() if applies), ""):
        raise CannotSplit(f"the model {reason}, so it cannot be computed in stages: leave stages out")
    if num_stages > config.num_layers:
        raise CannotSplit(f"stages names {num_stages} stages; the model has {config.num_layers} layers: name at most as many stages")


def bytes_of_layers(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> list[int]:
    """Return the number of bytes that each layer takes in the files, and as the last element the number of bytes of all other tensors. The
    embedding counts as part of the first layer. If the head uses the same matrix, the embedding counts among the other tensors, too."""
    prefix = prefix_of_decoder(tensors)
    embedding, layers = f"{prefix}{decoder_family(config.family).embedding}.", f"{prefix}layers."
    sizes = [0] * (config.num_layers + 1)
    for name, info in tensors.items():
        number = name.removeprefix(layers).partition(".")[0]
        if name.startswith(layers) and number.isdecimal() and int(number) < config.num_layers:
            sizes[int(number)] += info.num_bytes
            continue
        if name.startswith(embedding):
            sizes[0] += info.num_bytes
        if not name.startswith(embedding) or config.tie_word_embeddings:
            sizes[-1] += info.num_bytes
    return sizes


def split(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of each stage. Layer i takes `sizes[i]` bytes, and stage j has room for `capacities[j]` bytes. The split minimises
    the fraction of its room that the fullest stage uses. Each stage has at least one layer."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    num_layers, num_stages = len(sizes), len(capacities)
    assert 0 < num_stages <= num_layers, (num_stages, num_layers)
    # If the stages before the current one have the first n layers, the fullest of them uses at least the fraction `shares[n]` of its room.
    # `fullest[n]` is this fraction with the current stage included. If a stage ends before layer n, it begins at layer `cuts[stage][n]`.
    shares, cuts = [0.0] + [float("inf")] * num_layers, list[list[int]]()
    for stage, capacity in enumerate(capacities):
        fullest, begins = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            for begin in range(stage, end):
                share = max(shares[begin], (ends[end] - ends[begin]) / max(capacity, 1))
                if share < fullest[end]:
                    fullest[end], begins[end] = share, begin
        shares = fullest
        cuts.append(begins)
    found = [num_layers]
    for begins in reversed(cuts):
        found.append(begins[found[-1]])
    return tuple(range(begin, end) for begin, end in pairwise(reversed(found)))
