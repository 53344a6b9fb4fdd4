"""Costs of replicas that were measured before, so that a fleet can be simulated on any machine."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.bench.fleet.costs import Costs

# `relaxserve bench fleet --measure --model smollm2.gguf` with RELAXSERVE_THREADS=1, on one of two cores of a server CPU with AVX-512, whose
# other core did the same
SMOLLM2 = Costs(
    prompt={1: 0.00457, 4: 0.00581, 16: 0.0190, 64: 0.0712, 256: 0.253, 512: 0.573},
    decode={1: 0.00513, 2: 0.00519, 4: 0.00686, 8: 0.0119, 16: 0.0231, 32: 0.0440, 64: 0.0869},
    context_s=1.26e-6,
    max_tokens=512,
    max_seqs=64,
    capacity=2912 * 16,
)

MACHINES: Mapping[str, Costs] = {"smollm2-core": SMOLLM2}
