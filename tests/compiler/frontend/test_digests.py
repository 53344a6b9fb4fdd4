"""The digests of logits, per model and format, equal those recorded in tests/golden/digests.json, on every target.

Every kernel must give the same bits whatever its schedule, so a change of schedules, passes or code generation must not change the digests.
After a change that is meant to alter results (a new order of summation, another rounding), record the digests anew with pytest
--update-golden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.numerics import Numerics
from compiler.ir.dtypes import DType
from compiler.machine.target import Target, get

DIGESTS = Path(__file__).parents[2] / "golden" / "digests.json"
PLAIN = Target("plain", "x86_64", frozenset(["fma", "f16c"]), 128)  # without instructions that multiply integers and add
OTHERS = [t for t in map(get, ("x86-64-v3", "avx512", "avx512-vnni-bf16", "avx512-bf16-amd")) if t.can_run_here]
QUICK = (("wide", "bf16", DType.BF16), ("wide", "int8", DType.BF16), ("wide", "int4-32", DType.BF16))
# (model, weight format, type of keys and values). The products of `wide` have several panels, several blocks of k, and gated pairs. The
# other models cover details of a family.
CASES = [
    *(
        ("wide", format, dtype)
        for format in ("f32", "bf16", "int8", "int8-fast", "int4-32", "int8-128", "int4-128")
        for dtype in (DType.F32, DType.BF16)
    ),
    ("wide", "int8", DType.I8),
    ("gemma2", "int8", DType.F32),
    ("gemma3", "bf16", DType.BF16),
    ("phi3-longrope", "f32", DType.F32),
    ("qwen2-window-yarn", "int4-32", DType.I8),
]


def digest(model: Any) -> str:
    """Return the digest of the logits of five steps: a batch of prefill and decode, steps with one and with three sequences, a second such
    batch, and a step with ten sequences."""
    random = np.random.default_rng(7)
    vocab = model.config.vocab_size
    sequences, found = model.start(num_threads=2), hashlib.sha256()

    def feed(lengths: dict[str, int]) -> None:
        rows = sequences.feed({name: random.integers(3, vocab, length) for name, length in lengths.items()})
        for name in sorted(rows):
            found.update(rows[name].tobytes())

    feed({"a": 100, "b": 77, "c": 33, "d": 1})
    feed({"a": 1})
    feed({"a": 1, "b": 1, "c": 1})
    feed({"d": 19, "b": 2, "e": 64, **{f"s{n}": 1 for n in range(9)}})
    feed({"a": 1, **{f"s{n}": 1 for n in range(9)}})
    return found.hexdigest()[:16]


def check(name: str, value: str, update: bool) -> None:
    known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    if update:
        known[name] = value
        DIGESTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert name in known, f"{name} has no digest; pytest --update-golden -n 0 records it"
    assert known[name] == value, f"the bytes of {name} have changed"


def _params() -> Iterator[Any]:
    """Yield the cases on each target that this machine runs. `make test` runs each case of QUICK on PLAIN and on another target."""
    others = cycle(reversed(OTHERS))
    for case in CASES:
        quick = (PLAIN, next(others, PLAIN)) if case in QUICK else ()
        for target in (PLAIN, *OTHERS):
            yield pytest.param(*case, target, id=f"{named(*case)} {target.name}", marks=[] if target in quick else pytest.mark.slow)


def named(case: str, format: str, dtype: DType) -> str:
    return f"{case} {format} kv={dtype}"


@pytest.mark.parametrize(("case", "format", "dtype", "target"), list(_params()))
def test_logits_keep_their_bytes(
    causal: Callable[..., Any], request: pytest.FixtureRequest, case: str, format: str, dtype: DType, target: Target
) -> None:
    model = causal(case, format, target=target, kv_dtype=dtype, numerics=Numerics.PORTABLE)
    check(named(case, format, dtype), digest(model), request.config.getoption("--update-golden"))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", [Numerics.PORTABLE, Numerics.FAST])
@pytest.mark.parametrize("format", ["bf16", "int8", "int4-32"])
def test_logits_of_matrix_units_keep_their_bytes(
    causal: Callable[..., Any], request: pytest.FixtureRequest, amx: Target, format: str, numerics: Numerics
) -> None:
    """With portable numbers, a matrix unit gives the bytes of all other machines."""
    model, prefix = causal("wide", format, target=amx, kv_dtype=DType.BF16, numerics=numerics), "amx " if numerics is Numerics.FAST else ""
    check(f"{prefix}{named('wide', format, DType.BF16)}", digest(model), request.config.getoption("--update-golden"))
