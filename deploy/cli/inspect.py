"""`relaxserve inspect`: describe a model, its memory plan, and whether it fits on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from deploy.cli.output import ReportStage, answers, errors, stages
from deploy.cli.sources import PROGRAM, Source, load_of, takes
from runtime.units import in_units
from server.interfaces import LoadError
from server.messages import Load

if TYPE_CHECKING:
    from deploy.forms import ServedForm
    from deploy.inspection import Inspection
    from deploy.model_loading.plan import PlannedGroup
    from deploy.quality.speed import Quality


# the sentence about each numeric class
NUMBERS = {
    "portable": "the same bits on every CPU and in every export, but for WebAssembly without relaxed SIMD",
    "unfused": "the same bits on machines that round multiply-adds twice",
    "bf16": "the same bits on machines with AMD's BF16 instructions; --numerics portable computes the same everywhere",
    "amx": "the same bits on machines with AMX; --numerics portable computes the same everywhere",
}
NUMBERS_OF_GPU = "the same bits on GPUs that run this code"


@takes(*PROGRAM, "max_batch", "kv_cache_bytes")
def inspect(
    model: Source,
    quality: Annotated[bool, typer.Option("--quality", help="Load each format that fits, and measure its speed and its quality.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **form: Any,
) -> None:
    """Show a model's family, size, memory plan and signature, and whether it fits on this machine. Also compare the values of --quantize:
    the size of the weights, the context that fits beside them, and the rounding error, measured on sampled rows of some matrices. With
    --quality, also compare how far the predictions are from those of the exact weights, and the tokens per second that one client of a
    server on this machine gets.

    [bold]Examples[/bold]

      relaxserve inspect ~/models/Qwen2.5-0.5B-Instruct

      relaxserve inspect ~/models/Llama-3.2-1B --max-context 8192 --kv-cache-bytes 2G --json

      relaxserve inspect smollm2 --quality
    """
    from deploy.forms import compare_forms, fastest_without_loss, recommended
    from deploy.inspection import compiled, inspection_of, remedies
    from deploy.model_loading.files import Opened
    from deploy.model_loading.known import begin
    from deploy.model_loading.stages import advance
    from deploy.quantizing.kept import in_format

    load = load_of(model, **form)
    with stages(load.name) as report:
        # With --quality, --calibrate may be meant for the compared formats only, so drop it here if the format of `load` needs no
        # calibration. The compared formats are made from `opened`, whose weights are not quantised yet.
        opened = advance(begin(in_format(load, load.quantize) if quality else load, report), Opened)
        found = inspection_of(compiled(opened))
        advice = [] if found.fits else list(remedies(opened, found))
        forms = compare_forms(opened.files, found, load)
        qualities = _qualities(load, forms, report) if quality else {}
    labels = {name: one for name, one in qualities.items() if not isinstance(one, LoadError)}
    best = fastest_without_loss(forms, labels) if labels else recommended(forms)
    if as_json:
        derived = {"required_bytes": found.required_bytes, "fits": found.fits, "remedies": advice}
        derived |= {"forms": [_json_of(form, qualities.get(form.quantize)) for form in forms], "recommended": best and best.quantize}
        answers.print_json(json.dumps({**asdict(found), **derived}))
        return
    answers.print(_table(found, advice), highlight=False)
    answers.print(_forms(forms, best, qualities), highlight=False)
    for name, one in qualities.items():
        if isinstance(one, LoadError):
            errors.print(f"{name} was not measured: {one.message}", highlight=False, soft_wrap=True)


def _forms(forms: list[ServedForm], best: ServedForm | None, qualities: Mapping[str, Quality | LoadError]) -> Table:
    """Return the table of formats. `best` is the recommended one. `qualities` has the measured qualities, or {} if none was to be
    measured."""
    table = Table(box=None, header_style="bold", caption=_caption(qualities), caption_justify="left")
    titles = "--quantize", "weights", "longest context that fits", "of all sequences", "rounding error of weights"
    for title in (*titles, *(("tokens/s of one client", "KL", "top-1", "perplexity") if qualities else ())):
        table.add_column(title, justify="left" if title == "--quantize" else "right")
    table.add_column("")
    for form in forms:
        context = f"{form.max_context:,} tokens" if form.num_tokens else "none" if not form.fits else ""
        total = f"{form.num_tokens:,} tokens" if form.num_tokens else ""
        loss = f"{100 * form.loss:.2g} %" if form.loss else "none"
        measured = _measured(qualities.get(form.quantize)) if qualities else ()
        note = "recommended" if form is best else ""
        table.add_row(form.quantize, in_units(form.weights_bytes), context, total, loss, *measured, note)
    return table


def _caption(qualities: Mapping[str, Quality | LoadError]) -> str | None:
    """Return a caption that says how the speeds were measured, which is the same for all forms, or None if no speed was measured."""
    speed = next((one.speed for one in qualities.values() if not isinstance(one, LoadError)), None)
    if speed is None:
        return None
    return (
        f"tokens/s: what one client on this machine gets over HTTP from a server without other requests, after a prompt of "
        f"{speed.num_before} tokens"
    )


def _measured(quality: Quality | LoadError | None) -> tuple[str, ...]:
    """Return the cells of a form for its speed and its quality. They are empty if the form was not measured."""
    from server.models.quality import divergence_of

    if quality is None or isinstance(quality, LoadError):
        return "", "", "", ""
    label = quality.label
    return f"{quality.speed.tokens_per_s:.3g}", divergence_of(label), f"{label.top1_agreement:.1%}", f"{label.perplexity:.4g}"


def _qualities(load: Load, forms: list[ServedForm], report: ReportStage) -> dict[str, Quality | LoadError]:
    """Measure each form that fits. For a form that cannot be measured, the value is the error that says why."""
    from deploy.quality.speed import quality_of
    from deploy.quantizing.kept import in_format

    found: dict[str, Quality | LoadError] = {}
    for form in forms:
        if form.fits:
            try:
                found[form.quantize] = quality_of(in_format(load, form.quantize), report)
            except LoadError as error:
                found[form.quantize] = error
    return found


def _json_of(form: ServedForm, quality: Quality | LoadError | None) -> dict[str, object]:
    """Return a form for JSON, with its quality if it was measured, or why it could not be measured."""
    found: dict[str, object] = asdict(form)
    if isinstance(quality, LoadError):
        found["quality_note"] = quality.message
    elif quality is not None:
        found["quality"] = {**msgspec.structs.asdict(quality.label), **asdict(quality.speed)}
    return found


def _inputs_of(signature: str) -> str:
    """Shorten a signature to its inputs, the number of its weights and the ranges of its variables. The weights, which follow the inputs,
    have constant shapes."""
    params, where, ranges = signature.rpartition(" where ")
    types = re.findall(r"\w+\[[^]]*\]", params)
    inputs = list(takewhile(lambda type_: re.search(r"\bn\d", type_), types))
    return f"({', '.join(inputs)}, {len(types) - len(inputs)} weights){where}{ranges}"


def _group(group: PlannedGroup) -> str:
    """Describe a cache group: its size, its pages, and for how many tokens its layers store data."""
    kept = (
        "all tokens"
        if group.window is None
        else f"a state each {group.page_size} tokens"
        if group.keeps_states
        else f"a window of {group.window} tokens"
    )
    pages = f"{group.num_pages} pages of {in_units(group.page_bytes)}"
    return f"{in_units(group.num_bytes)}: {pages}, {group.num_layers} layers that store {kept}"


def _table(found: Inspection, advice: list[str]) -> Table:
    """Return the table of facts about the model. `advice` says with which settings the model would fit."""
    plan = found.plan
    counts = sorted(found.dtypes.items(), key=lambda item: -item[1])
    dtypes = ", ".join(f"{count / 1e6:,.1f} M {dtype}" if count >= 1e5 else f"{count:,} {dtype}" for dtype, count in counts)
    parts = ", ".join(f"{part} {in_units(size)}" for part, size in found.bytes_by_part.items())
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", found.source)
    table.add_row("family", found.family)
    if found.defaults:
        table.add_row("defaults", found.defaults)
    table.add_row("serves", ", ".join(found.serves) + (f" ({found.embedding_note})" if found.embedding_note else ""))
    table.add_row("parameters", f"{found.num_parameters / 1e6:,.1f} million ({dtypes})")
    table.add_row("files", f"{in_units(found.file_bytes)}: {parts}")
    context = f"context {found.max_context:,} of {found.model_context:,}"
    form = found.quantize if found.format == found.quantize else f"{found.quantize}, which is {found.format} here"
    table.add_row("bounds", f"{context}, {found.max_batch} sequences at once, weights as {form}")
    if len(found.devices) > 1:
        table.add_row("devices", f"{', '.join(found.devices)}; what follows is the memory of each")
    table.add_row("weights", in_units(plan.weights_bytes))
    table.add_row("arena", in_units(plan.arena_bytes))
    if plan.graphs_bytes:
        table.add_row("graphs", in_units(plan.graphs_bytes))
    size = in_units(plan.kv_cache_bytes)
    filled = f"up to {size}, as it fills" if found.devices == ("cpu",) else size  # a GPU allocates the whole cache at load
    table.add_row("kv cache", filled if plan.groups else "none")
    for group in plan.groups:
        table.add_row("", _group(group))
    table.add_row("program", f"{found.key}, {'from the cache' if found.cache_hit else f'compiled in {found.compile_s:.1f} s'}")
    table.add_row("numbers", f"{found.numeric_class}: {NUMBERS.get(found.numeric_class, NUMBERS_OF_GPU)}")
    for scheme, count in found.schemes.items():
        table.add_row("", f"{count} products of {scheme}")
    table.add_row("signature", _inputs_of(found.signature))
    verdict = f"needs at most {in_units(found.required_bytes)} with its worker, {in_units(found.available_bytes)} are available"
    table.add_row("fits here", f"yes: {verdict}" if found.fits else f"no: {verdict}")
    for line in advice:
        table.add_row("would fit with", line)
    return table
