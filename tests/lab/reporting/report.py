"""`python -m tests.lab report`: write BENCHMARKS.md, a page per machine and the chart from the figures that
`python -m tests.lab NAME --keep` stored in tests/lab/results. `--day FILE` first stores the lines of a day with a card there."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

from tests.lab.reporting.chart import CHART, STEPS, drawn, peer_title
from tests.lab.reporting.day import read_day
from tests.lab.reporting.record import ROOT, Record, file_name, read_all

FILE = ROOT / "BENCHMARKS.md"
PAGES = ROOT / "docs" / "benchmarks"  # one page per machine
MOST_ROWS = 40  # maximum number of rows in a table of figures; only the JSON file has further rows
LEAST_SHARE = 0.02  # minimum share of a step's time of a kernel in a table; only the JSON file has further kernels
HEAD = """# Benchmarks

`python -m tests.lab report` writes this page, the pages of the machines and the chart. The command takes all figures from the JSON files in
[tests/lab/results](tests/lab/results); none is typed by hand. To measure on your machine, run `python -m tests.lab NAME --keep` in a
checkout (`python -m tests.lab` lists the names), then `python -m tests.lab report`.

Many figures have a goal. The speed of a shared machine changes by a third within a minute, so most goals for speeds are ratios to a limit
or to a peer that the same run measured. [Measurements](docs/benchmarks/decisions) has the figures behind the decisions of this project;
those pages are written by hand.

The chart shows five of the comparisons in [Other peers](#other-peers), all of them on one machine:

![Tokens per second of relaxserve and other engines](docs/images/peers.svg)

## Real models beside llama.cpp
{real}
## Other peers

A peer is another inference engine. relaxserve ran all steps, and then the peer ran the same steps on the same machine, with the same number
of threads. The speed of the machine may have changed in between. Speeds are tokens per second of relaxserve divided by those of the peer.
`prefill N` computes N tokens of one prompt; `decode N x C` computes one token for each of N sequences whose context has C tokens. The
weights are random, so these figures say nothing about quality.
"""
REAL = """
`python -m tests.lab real` serves the same file with relaxserve and with llama.cpp, and sends both servers the same requests in turns. The
servers have the same number of threads, and memory for the keys and values of the same number of tokens. llama.cpp is also told to answer
32 requests at once, with one pool of keys and values for all of these requests. All other settings are the defaults of each server. A speed
is relaxserve's tokens per second divided by llama.cpp's (more is better), the median of all turns; memory is divided in the same way (less
is better). An empty cell was not measured.

- `decode of 1`: the speed at which one client gets the tokens of its answer after the first. The next column has the same figure for half
  of the turns: the turns before which the measured memory bandwidth of the machine was highest.
- `prefill of 1024`: the speed at which a prompt of 1,024 tokens is read.
- `8 clients`, `32 clients`: the speed at which so many clients together get their answers, with prompts of 128 tokens and answers of 64.
- `error of the stated decode of 1`: the difference between the speed that `relaxserve inspect --quality` states and the speed that a client
  measured, divided by the measured speed.
- `equal most probable tokens`: the fraction of the tokens of a text for which relaxserve and the exact weights of the file find the same
  token most probable. The text is that of the quality label (`relaxserve inspect --quality`).
- `KL`: the Kullback-Leibler divergence of the predictions from those of the exact weights, in nats per token, on the same text: that of
  relaxserve and, in brackets, that of llama.cpp, which is measured at every fourth token.
- `first start`, `second start`: the time from relaxserve's command to its first answer, with an empty cache and with the compiled model in
  the cache. The figure of the second start is the shortest of three. For these starts, all settings of relaxserve are the defaults.
"""
MACHINES = """
## Machines

| Machine | Benchmarks | Measured |
| --- | --- | --- |
"""
PAGE = """Written by `python -m tests.lab report`; [BENCHMARKS.md](../../BENCHMARKS.md) says how. A benchmark has a section for each set of
options with which it ran, and the section states the command. `A over B` and `A / B` mean A divided by B. p50 is the median; 99 % of the
values are at most p99. A + after a commit means that files differed from the commit. `--quantize int4` in a command is called
`--quantize int4-32` today. `reached` compares the figure with the goal before it is rounded.
"""
# Explanations of the terms in the tables of a benchmark.
TERMS = {
    "apis": "Concurrent clients stream answers. The first row is the speed at which all of them together get tokens from "
    "`/v1/chat/completions` (chat). Each other row is the speed of another API, divided by that of chat, for the same questions and the "
    "same tokens. The front is the process that answers HTTP requests.",
    "batch": "Live clients stream one answer after another, with pauses between them, in turns alone and beside a batch. `slower` is the "
    "fraction by which the batch raises the median latency of the live clients. A line is one request of a batch. `share of what is left` "
    "compares the batch with the time that live clients leave it: the fraction of the time in which none of their requests runs, measured "
    "while they are alone. The share is the lines per second of the batch beside live clients, divided by the product of this fraction "
    "and the lines per second of the batch alone. It may exceed 1, because lines also run within the steps of live requests. The last "
    "three rows are about a second batch. While it runs, the server is killed as often as `--kills` says, and started again. The note has "
    "the number of lines of this batch, and lists how many of them were answered at each kill.",
    "cuda_day": "The steps of a day with a card, and below them what they found. The bandwidth of copies counts bytes that are read and "
    "bytes that are written. `planned bytes` are those that the kernels of a step must read; the share of copies is the time for "
    "copying as many bytes, divided by the time of the step. Shapes have few layers; the speed of the whole shape is computed from "
    "the times of the kernels that every layer repeats.",
    "embed": "`relaxserve export` has written a model with random weights as a C library for the machine that the notes name, once static "
    "(an archive) and once shared. Each size of a library includes its header. `a sequence beside its keys and values` is the memory that "
    "a sequence needs in addition to its keys and values, mostly for intermediate results. The stack is that of a thread which computes a "
    "step. The last row divides the memory in addition to keys and values by the compute buffer that llama.cpp allocates for the same "
    "context and the same number of tokens per step.",
    "fleet_agents": "A trace is a list of requests with the times at which they are sent. The same trace of agent sessions is sent to one "
    "large replica, to a fleet of replicas behind its router, and to these replicas in turn, without the router. A request of a session "
    "begins with the prompt of the request before. The router sends a request to the replica whose prefix cache has most of its prompt. "
    "The large replica has as many pages in its prefix cache as all replicas of the fleet together. Hits are the prompt tokens that a "
    "prefix cache had, as a fraction of all prompt tokens. The last two rows divide the hits of the replicas, with and without the "
    "router, by those of the large replica.",
    "hostile": "While requests or connections that might hold up the server are sent, one client reads a stream, and another requests "
    "`/health/live` again and again (the probe). A row with a method, a path and a field is about requests with large values of this "
    "field. Its figure is the longest pause of the stream or the longest wait of the probe, whichever is longer, and the note names the "
    "value that caused it. `unknown` is a field that no endpoint knows; `several fields` are requests with large answers. Status 0 means "
    "that the server closed the connection before it had read the body. `without requests` is measured in the same way while no such "
    "request is sent, so it shows the delays that the machine itself causes. A row that ends in `stream`, `probe` or `growth of the "
    "front` is about 100 connections without a key, all of which send the same kind of data (`tests/lab/serving/floods.py`). It has the "
    "longest pause of the stream, the longest wait of the probe, or the growth of the memory of the front, which is the process that "
    "answers HTTP requests. `no connections` is measured while there are no such connections. Whatever is beyond its goal is measured "
    "again, in up to five rounds, and the best round counts, because the machine also delays requests at random. Of `without requests` "
    "and `no connections`, the worst round counts. The three rows of one kind of connections are from the same round.",
    "kernels": "`prefill N` computes N tokens of one prompt. `decode N x C` computes one token for each of N sequences whose context has C "
    f"tokens. Each row is a kernel that takes at least {LEAST_SHARE:.0%} of the time of all kernels of its step; `part` is its part of "
    "that time. `launches` counts each phase of a kernel: attention has four. `ms`, `MB read` and `GFLOP` are sums over all launches in a "
    "step. `MB read` counts all operands of a kernel once, its results included; for attention it counts only keys and values. Where rows "
    "have 16 bits in two planes of 8 bits, as in the kernels `integer_linear` here, `GFLOP` counts the operations of both planes. The "
    "limit of a kernel is the time that its MB take at the memory bandwidth, or its operations at the peak of arithmetic, whichever is "
    "longer. `share of the limit` is this time divided by the measured time. `limits of weights` are the bandwidth and the peak for "
    "kernels that multiply by weights; `limits of others` are those for all other kernels, with the peak of f32. A share "
    "may exceed 1, since data in a "
    "cache are read faster than memory, and since attention may multiply bf16, which some machines do faster than f32.",
    "load": "The goal of a memory figure is the memory that the load plans: weights, arena (the memory for intermediate results), KV "
    "pages and 300 MiB for the process. While the model loads, the goal includes the largest shard, too; a shard is a file of the "
    "checkpoint. The first start has an empty cache. A later start finds the compiled program and the packed weights in the cache. A cold "
    "start finds them too, but the packed weights are only on disk, not in memory; its prompt has one token.",
    "model": "The model has random weights, and the sizes that `deploy/bench/synthetic.py` lists under the name after `--synthetic`; "
    "`--layers` replaces the number of layers. `prefill N` computes N tokens of one prompt. `decode N x C` computes one token for each of "
    "N sequences whose context has C tokens. `MB read` and `GFLOP` are the least that a step must read and compute. For a mixture, `MB "
    "read` has as many experts as are chosen on average if tokens choose independently. Where `prefill 512` of 0.5b has 536 instead of "
    "503 GFLOP, an earlier version counted the output head for every token of a prompt, not only for its last one. The limit of a step is "
    "the time that these MB take at the memory bandwidth, or these operations at the peak of arithmetic, whichever is longer. `share of "
    "the limit` is this time divided by the measured time. Bandwidth and peak were measured together with each step; `limits` above a "
    "table are those of its last step. The steps ran one after another, while the bandwidth of the machine changed. So compare the shares "
    "of two rows, not their tokens per second. A share may exceed 1, since bandwidth and peak vary, and since the tokens of a step may "
    "choose fewer experts of a mixture. If a table has a peer, which is another engine, the peer ran the same steps after relaxserve; the "
    "speedup is relaxserve's tokens per second divided by the peer's.",
    "real": "[BENCHMARKS.md](../../BENCHMARKS.md#real-models-beside-llamacpp) explains the figures. `A / llama.cpp's` is the figure of "
    "relaxserve divided by that of llama.cpp. Where a note joins two figures by `and`, the first is relaxserve's and the second "
    "llama.cpp's.",
    "serve": "A burst of N is N clients that send a prompt of 128 tokens at once and receive 128 tokens each. The first burst has the "
    "first requests after the load; the second follows, with other prompts. The ideal is the time in which the model, without the engine, "
    "runs prompts of the same lengths in full chunks (`all prompts`) and then steps of all sequences; `throughput / ideal` is this time "
    "divided by the measured time. `by CPU time` divides CPU times instead, which other load on the machine does not increase. `share of "
    "time outside kernels` is the fraction of the time in which no kernel runs. `arrivals` are 2 N clients that arrive at random, 0.7 "
    "times as many per second as the ideal serves; their ideal is the time of the last arrival, plus the time that the model needs for as "
    "many clients as are there at once on average. `arrival` is a prompt of 2,000 tokens that arrives while 16 other clients receive "
    "tokens. `over HTTP` is measured through a server process, all other rows inside the engine's process. The peer llama-server is the "
    "server of llama.cpp; `our` figures are relaxserve's over HTTP.",
    "sight": "A model with random weights, which has the shape of SmolVLM 256M except for its vocabulary, reads an image of four "
    "megapixels. The model's processor scales the image down and cuts it into nine crops of 512 x 512 pixels; a small copy of the whole "
    "is the tenth. The second question is about the same image, which the prefix cache then has. A gap is the time between two tokens; "
    "the other stream is that of a client that gets text while a new image is encoded.",
    "web": "The programs are compiled to WebAssembly, as `relaxserve export --target web` does for browsers. They run in Node, except "
    "that the time from the browser's cache and comparisons with another engine are measured in Chromium. The f32 product has 64 rows and "
    "512 x 512 weights; `two threads over one` is about this product, too. The peak is the rate of multiply-adds in registers, also in "
    "WebAssembly. Decoding is for one sequence, with weights of 4 bits. A native thread runs the same decoding step, compiled for CPUs of "
    "the level `x86-64-v3` instead of WebAssembly. With the peer wllama, which is llama.cpp compiled to WebAssembly, both engines run in "
    "one page: `prefill` has 128 tokens, and `decode` the tokens after them.",
}

Row = Mapping[str, Any]


class Table(NamedTuple):
    title: str
    conditions: str  # conditions of the measurement in addition to the command, the date and the commit
    rows: Sequence[Row]


def pages(records: Iterable[Record]) -> dict[Path, str]:
    """Return the text of BENCHMARKS.md, and of the page of each machine."""
    ordered = sorted(records, key=lambda record: (record.machine, record.command))
    of_machine = {machine: list(some) for machine, some in groupby(ordered, key=lambda record: record.machine)}
    found = {PAGES / f"{file_name(machine)}.md": _page(machine, some) for machine, some in of_machine.items()}
    return {FILE: _front(of_machine), **found}


def _front(of_machine: Mapping[str, Sequence[Record]]) -> str:
    compared = [row for some in of_machine.values() for record in some if record.benchmark == "model" for row in _speedups(record)]
    machines = [
        f"| [{machine}](docs/benchmarks/{file_name(machine)}.md) | {len(some)} | {min(dates)} to {max(dates)} |"
        for machine, some in of_machine.items()
        if (dates := [record.date for record in some])
    ]
    real = [row for some in of_machine.values() for record in some if record.benchmark == "real" for row in _of_real(record)]
    head = HEAD.replace("{real}", "\n".join([REAL, *_lines(real), ""]))
    return "\n".join([head, *_lines(compared)]) + "\n" + MACHINES + "\n".join(machines) + "\n"


def _speedups(record: Record) -> Iterator[Row]:
    ours = {row["name"]: row["tokens_per_s"] for row in record.found["rows"]}
    for name, peer in record.found["peers"].items():
        theirs = {row["name"]: row["tokens_per_s"] for row in peer["rows"]}
        yield {
            "machine": record.machine,
            "model": _title(record).partition(", ")[2].partition(", peer")[0],
            "peer": f"{peer_title(name)} {peer.get('version', '')}".rstrip(),
            **{step: ours[step] / theirs[step] for step in STEPS if step in ours and step in theirs},
        }


def _of_real(record: Record) -> Iterator[Row]:
    """Yield a row per model. The names of figures begin with the name of the model."""
    named = [(*row["name"].partition(": ")[::2], row) for row in record.found]
    for model, rows in groupby(named, key=lambda each: each[0]):
        found = {name.removesuffix(" / llama.cpp's"): row for _, name, row in rows if name != "KL / llama.cpp's"}
        cells = {name: row["value"] for name, row in found.items() if row["unit"] == ""}
        kl, theirs = cells.pop("KL"), found["KL"]["note"].removeprefix("llama.cpp ")
        starts = {name: f"{row['value']:.1f} s" for name, row in found.items() if row["unit"] == "s"}
        yield {"machine": record.machine, "model": model, **cells, "KL": f"{kl:.2g} ({theirs})", **starts}


def _page(machine: str, records: Sequence[Record]) -> str:
    return "\n".join([f"# {machine}\n", PAGE, *map(_section, records)]).rstrip("\n") + "\n"


def _section(record: Record) -> str:
    lines = [f"## {_title(record)}\n"]
    if record.benchmark in TERMS:
        lines.append(TERMS[record.benchmark] + "\n")
    tables = {"model": _of_model, "kernels": _of_kernels}.get(record.benchmark, _lists)(record.found)
    for title, conditions, rows in tables:
        named = f"**{title}**: " if title else ""
        lines += [f"{named}`{record.command}`, {record.date}, commit {record.commit}{f'; {conditions}' if conditions else ''}.\n"]
        lines += [*_lines(rows), ""]
    return "\n".join(lines)


def _title(record: Record) -> str:
    return " ".join((record.benchmark.replace("_", "-"), *record.arguments)).replace(" --", ", ")


def _of_model(found: Any) -> Iterator[Table]:
    """Yield the table of `model`, and with --beside the table of the quotients of both models' shares."""
    peers = [f"{peer_title(name)} {version}" for name, peer in found["peers"].items() if (version := peer.get("version"))]
    ratio = found.get("lengthening")
    apart = "in a separate measurement, in which both steps ran in turns"
    longer = [f"{apart}, decoding a token after the longest context takes {ratio:.2f} times as long as after the shortest"] if ratio else []
    growth = found.get("growth", [])
    longest = max((group["window"] or 0 for group in growth), default=0)
    grown = [
        f"until a sequence has 1, 2, 3 and 4 times {longest} tokens, it holds at most {', '.join(map(str, group['pages']))} pages for "
        + ("the layers without a window" if group["window"] is None else f"the layers with a window of {group['window']} tokens")
        for group in growth
    ]
    yield Table("", "; ".join((_conditions(found["limits"]), *longer, *grown, *peers)), _beside_peers(found["rows"], found["peers"]))
    if (beside := found.get("beside")) is not None:
        explained = (
            "medians and quartiles over all turns, in each of which both models ran the step once, in the same format; the share of the "
            "peak is the operations per second divided by the peak of arithmetic, also where memory is the limit"
        )
        yield Table(f"in turns with {beside['shape']}", explained, _quotients(beside["rows"], beside["shape"]))


def _quotients(rows: Sequence[Row], shape: str) -> list[Row]:
    """Return the rows that divide a model's shares by those of another shape."""
    columns = {"limit": f"share of the limit / that of {shape}", "peak": f"share of the peak / that of {shape}"}
    return [
        {
            "step": row["name"],
            **{
                column: f"{_text(row[share]['median'])} ({_text(row[share]['lower'])} to {_text(row[share]['upper'])})"
                for share, column in columns.items()
            },
            "turns": row["turns"],
        }
        for row in rows
    ]


def _of_kernels(found: Any) -> Iterator[Table]:
    """Yield the only table of `kernels`: for each step, the kernels that take at least LEAST_SHARE of its time, the slowest first."""
    limits = "; ".join(_conditions(limits, f" of {kernels}") for kernels, limits in found["limits"].items())
    of_step = {step: sum(row["seconds"] for row in rows) for step, rows in groupby(found["rows"], key=lambda row: row["step"])}
    rows = sorted(found["rows"], key=lambda row: (list(of_step).index(row["step"]), -row["seconds"]))
    shown: list[Row] = [
        {
            "step": row["step"],
            "kernel": row["kernel"],
            "launches": row["launches"],
            "ms": row["seconds"] * 1e3,
            "part": row["seconds"] / of_step[row["step"]],
            "share of the limit": row["share"],
            "MB read": row["num_bytes"] / 1e6,
            "GFLOP": row["operations"] / 1e9,
        }
        for row in rows
        if row["seconds"] >= LEAST_SHARE * of_step[row["step"]]
    ]
    yield Table("", limits, shown)


def _conditions(limits: Row, of_kernels: str = "") -> str:
    """Describe the limits of the machine that the same run measured."""
    scales = {"bytes_per_s": (1e9, "GB/s of memory bandwidth"), "flops": (1e9, "GFLOP/s")}
    return f"limits{of_kernels}: {', '.join(f'{limits[name] / scale:.0f} {unit}' for name, (scale, unit) in scales.items())}"


def _beside_peers(rows: Sequence[Row], peers: Mapping[str, Any]) -> list[Row]:
    """Join the rows of `model` with the rows of its peers, which ran the same steps in the same order."""
    return [
        {
            "step": row["name"],
            "tokens per second": row["tokens_per_s"],
            "share of the limit": row["share"],
            "MB read": row["num_bytes"] / 1e6,
            "GFLOP": row["operations"] / 1e9,
            **{
                column: value
                for name, peer in peers.items()
                for column, value in (
                    (f"{peer_title(name)}, tokens per second", peer["rows"][number]["tokens_per_s"]),
                    (f"speedup over {peer_title(name)}", row["tokens_per_s"] / peer["rows"][number]["tokens_per_s"]),
                )
            },
        }
        for number, row in enumerate(rows)
    ]


def _lists(found: Any, title: str = "") -> Iterator[Table]:
    """Yield the tables for the output of a benchmark. Each list of rows becomes a table, at any depth; the single values of an object
    become one more table."""
    if isinstance(found, list):
        rows = cast("list[Row]", found)
        yield Table(title, _shown(rows), _figures(rows)) if rows and "goal" in rows[0] else Table(title, "", rows)
        return
    values = cast("Row", found)
    alone: Row = {name: value for name, value in values.items() if not isinstance(value, dict | list)}
    if alone:
        yield Table(title, "", [alone])
    for name, inner in values.items():
        if isinstance(inner, dict | list) and inner:
            yield from _lists(inner, f"{title}: {name}" if title else name)


def _shown(rows: Sequence[Row]) -> str:
    return f"the {MOST_ROWS} largest of {len(rows)} figures" if len(rows) > MOST_ROWS else ""


def _figures(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a table that compares figures with their goals. If there are too many figures, keep the largest."""
    if len(rows) > MOST_ROWS:
        rows = sorted(rows, key=lambda row: row["value"], reverse=True)[:MOST_ROWS]
    return [
        {
            "figure": row["name"],
            "measured": f"{_text(row['value'])} {row['unit']}".rstrip(),
            "goal": "" if row["goal"] is None else f"{'>=' if row['at_least'] else '<='} {row['goal']:g}",
            "reached": {None: "", True: "yes", False: "no"}[row["reached"]],
            "note": row["note"],
        }
        for row in rows
    ]


def _lines(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table for the rows, without empty columns."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list)))
    cells = [[_text(row.get(name, "")) for name in columns] for row in rows]
    kept = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    lines = [[columns[at].replace("_", " ") for at in kept], ["---"] * len(kept), *([row[at] for at in kept] for row in cells)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case _:
            return str(value).replace("|", "\\|").replace("\n", " ")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab report", description=__doc__)
    parser.add_argument("--day", type=Path, help="day.jsonl of a day with a card: add its figures to those that are stored")
    options = parser.parse_args(argv)
    if options.day is not None:
        print(f"written to {read_day(options.day).keep()}")
    records = read_all()
    written = {**pages(records), CHART: drawn(records)}
    for file in {*PAGES.glob("*.md")} - written.keys():
        file.unlink()
    for file, text in written.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    print(f"{len(records)} records in {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
