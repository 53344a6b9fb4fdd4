"""The chart of the README, which compares relaxserve with its peers. It is drawn as SVG from the records of
`python -m tests.lab model --peer NAME --keep`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from tests.lab.peer import PEERS
from tests.lab.reporting.record import ROOT, Record

CHART = ROOT / "docs" / "images" / "peers.svg"
# These steps and this order were chosen before anything was measured. The chart shows the first step beside every peer, then the second
# step, and so on.
STEPS = {
    "decode 1 x 128": "decode, 1 sequence",
    "prefill 512": "prefill, 512 tokens",
    "decode 8 x 128": "decode, 8 sequences",
    "decode 1 x 4096": "decode, 1 sequence, context 4,096",
    "decode 32 x 128": "decode, 32 sequences",
}
MOST_BARS = 5
TITLES = {"llama-cpp-python": "llama.cpp", "torch": "PyTorch", "openvino": "OpenVINO"}

WIDTH, LEFT, BAR, ROW, TOP = 760, 250, 16, 52, 56  # sizes in pixels
LONGEST = 380  # width of the longest bar; its label is to the right of the bar
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.t{font-size:15px;font-weight:600}.n{fill:#59636e}.a{fill:#0969da}.b{fill:#afb8c1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.n{fill:#9198a1}.a{fill:#4493f8}.b{fill:#59636e}}"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per second of relaxserve and of a peer for one step, measured in one run."""

    machine: str
    step: str
    weights: str
    peer: str
    ours: float
    theirs: float


def peer_title(name: str) -> str:
    return TITLES.get(name, name)


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """Return the comparisons of the chart. All of them are from the machine that has most comparisons."""
    found: dict[str, list[Comparison]] = {}
    of_peers = sorted((record for record in records if _is_plain(record)), key=lambda record: record.command)
    for step in STEPS:
        for record in of_peers:
            found.setdefault(record.machine, []).extend(_of(record, step))
    return max(found.values(), key=len, default=[])[:MOST_BARS]


def _is_plain(record: Record) -> bool:
    """Return whether a record measures the model of 0.5 billion parameters, without options that change its shape or its target."""
    options = {argument for argument in record.arguments if argument.startswith("--")}
    is_model = record.benchmark == "model" and _option(record, "--synthetic", "0.5b") == "0.5b"
    return is_model and options <= {"--synthetic", "--quantize", "--peer"}


def _of(record: Record, step: str) -> Iterator[Comparison]:
    weights = _option(record, "--quantize", "bf16")
    ours = {row["name"]: row["tokens_per_s"] for row in record.found["rows"]}
    for peer, compared in record.found["peers"].items():
        theirs = {row["name"]: row["tokens_per_s"] for row in compared["rows"]}
        if step in ours and step in theirs:
            format = PEERS[peer].formats.get(weights, weights) if peer in PEERS else ""
            yield Comparison(record.machine, STEPS[step], weights, f"{peer_title(peer)} {format}", ours[step], theirs[step])


def _option(record: Record, name: str, default: str) -> str:
    arguments = record.arguments
    return arguments[arguments.index(name) + 1] if name in arguments else default


def drawn(records: Iterable[Record]) -> str:
    """Return the chart as SVG. The two bars of one comparison have the same scale; different comparisons have different scales."""
    bars = comparisons(records)
    machine = bars[0].machine if bars else "no peer measured yet"
    height = TOP + ROW * len(bars) + 28
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>Tokens per second of relaxserve and of other engines, on {escape(machine)}</title>",
        f"<style>{STYLE}</style>",
        '<text class="t" x="0" y="18">Tokens per second, 0.5 billion parameters</text>',
        '<text class="n" x="0" y="38">blue: relaxserve; grey: the peer, with the same weights and threads, in the same run</text>',
    ]
    for number, bar in enumerate(bars):
        y = TOP + ROW * number
        scale = LONGEST / max(bar.ours, bar.theirs)
        lines += [
            f'<text x="0" y="{y + 13}">{escape(bar.step)}</text>',
            f'<text class="n" x="0" y="{y + 13 + BAR + 2}">{escape(bar.weights)} beside {escape(bar.peer)}</text>',
            f'<rect class="a" x="{LEFT}" y="{y}" width="{bar.ours * scale:.1f}" height="{BAR}" rx="2"/>',
            f'<text x="{LEFT + bar.ours * scale + 6:.1f}" y="{y + 13}">{bar.ours:,.0f} ({bar.ours / bar.theirs:.2f}x)</text>',
            f'<rect class="b" x="{LEFT}" y="{y + BAR + 2}" width="{bar.theirs * scale:.1f}" height="{BAR}" rx="2"/>',
            f'<text class="n" x="{LEFT + bar.theirs * scale + 6:.1f}" y="{y + 13 + BAR + 2}">{bar.theirs:,.0f}</text>',
        ]
    lines += [f'<text class="n" x="0" y="{height - 8}">{escape(machine)}</text>', "</svg>"]
    return "\n".join(lines) + "\n"
