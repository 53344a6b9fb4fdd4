"""Options of the commands that take a model: the format of its weights, its limits, its names. One table declares them for all commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from deploy.settings import absolute, model_spec, num_bytes_or_share
from runtime.device.registry import NAME as DEVICE_NAME
from server.load_settings import LEAST_CONTEXT, LONGEST_GAP_MS, MOST_RANKS, MOST_SEQUENCES
from server.messages import Load

Source = Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, 'demo', or a name in `ls --available`.")]
Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class LoadOption:
    """An option that sets a field of a load. Typer passes None if the user does not give the option; the field then keeps its default."""

    kind: Any  # type of the option's value
    meaning: str  # help text of the option
    metavar: str = "TEXT"  # what the help shows as the option's value; "" for a flag
    names: tuple[str, ...] = ()  # empty: the name of the field
    parser: Callable[[str], Any] | None = None  # returns the value of the option's text; None: typer parses it by `kind`

    def annotation(self, panel: str | None) -> Any:
        """Return the annotation of a parameter for typer. `panel`: title of the part of the help that shows the option."""
        about = typer.Option(
            *self.names, help=self.meaning, metavar=self.metavar, rich_help_panel=panel, show_default=False, parser=self.parser
        )
        return Annotated[self.kind | None, about]


def _within(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`. Typer's own ranges would add a wide column to the help."""

    def parsed(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not least <= int(text) <= most:
            raise typer.BadParameter(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parsed


def _bytes_or_share(text: str) -> int | float:
    """Parse a size or a share for typer. Raise BadParameter if the text is neither."""
    try:
        return num_bytes_or_share(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of bytes; expected a number such as 1000000, 64M or 2G, or 50%") from None


def _device(text: str) -> str:
    """Return the name of a device. Raise BadParameter if it is none; whether the machine has the device is not checked."""
    if not re.fullmatch(DEVICE_NAME, text):
        raise typer.BadParameter(f"device is {text!r}; expected cpu, cuda, or one of several GPUs as cuda:1")
    return text


OPTIONS: dict[str, LoadOption] = {
    "quantize": LoadOption(
        str,
        "Number format of the weights: auto (that of the files), bf16, int8, 6bit, 5bit, 4bit, a number of bits such as 4.6, f32, "
        "auto-fast, int8-fast, int8-128, int4-32 (docs/models.md).",
    ),
    "calibrate": LoadOption(str, "Text on which 4bit and other numbers of bits measure which weights matter.", "FILE", parser=absolute),
    "max_context": LoadOption(
        int,
        "Longest sequence, in tokens; by default the model's, if memory suffices.",
        "N",
        ("--max-context", "--max-model-len", "--ctx-size", "-c"),  # the other names are those of vLLM and llama.cpp
        _within(LEAST_CONTEXT, 2**31 - 1),
    ),
    "max_batch": LoadOption(int, "Maximum number of sequences per step, by default 64.", "N", parser=_within(1, MOST_SEQUENCES)),
    "max_gap_ms": LoadOption(
        int,
        "Longest pause of a stream, in milliseconds, while prompts of other requests are prefilled.",
        "N",
        parser=_within(1, LONGEST_GAP_MS),
    ),
    "kv_cache_bytes": LoadOption(
        float, "Memory for keys and values: 2G, or 50% of what the weights leave.", "BYTES", parser=_bytes_or_share
    ),
    "kv_dtype": LoadOption(str, "Number format of keys and values: auto, f32, f16, bf16, int8."),
    "numerics": LoadOption(str, "How products are computed: portable (equal on all CPUs), fast, or auto (by the weights)."),
    "target": LoadOption(str, "Instruction set to use: host, or a smaller one such as x86-64-v3."),
    "device": LoadOption(str, "Device that runs the model: cpu, cuda, or one of several GPUs such as cuda:1.", parser=_device),
    "tensor_parallel": LoadOption(
        int,
        "Number of GPUs that compute each layer together, from --device on.",
        "N",
        ("--tensor-parallel", "--tensor-parallel-size"),
        _within(1, MOST_RANKS),
    ),
    "embeddings": LoadOption(bool, "Serve embeddings of a decoder, too.", ""),
    "label": LoadOption(bool, "Measure the quality label before serving.", ""),
    "stages": LoadOption(str, "Divide the layers: 2, or HOST:PORT,local."),
    "aliases": LoadOption(list[str], "Further name; may be repeated.", names=("--alias", "--served-model-name")),
    "pin": LoadOption(bool, "Refuse to unload without --force.", ""),
    "tool_parser": LoadOption(
        str,
        "Format of tool calls, such as hermes or mistral; by default that of the chat template.",
        names=("--tool-parser", "--tool-call-parser"),
    ),
    "reasoning": LoadOption(bool, "Whether the model writes think blocks; by default as its vocabulary says.", ""),
    "defaults": LoadOption(list[str], "Default for requests, such as temperature=0.2 or system=@FILE.", names=("--default",)),
}
PROGRAM = ("quantize", "calibrate", "max_context", "kv_dtype", "numerics", "target", "device", "tensor_parallel")  # decide what is compiled


def name_of(field: str) -> str:
    """Return the name of the option that sets a field."""
    return next(iter(OPTIONS[field].names), f"--{field.replace('_', '-')}")


def takes(*fields: str) -> Callable[[Command], Command]:
    """Give a command the options that set these fields of a load. The command is called with a keyword argument for each option that the
    user gives."""

    def with_options(command: Command) -> Command:
        def run(**arguments: Any) -> None:
            command(**{name: value for name, value in arguments.items() if name not in fields or value not in (None, [])})

        types, own = get_type_hints(command, include_extras=True), inspect.signature(command).parameters.values()
        parameters = [one.replace(kind=one.KEYWORD_ONLY, annotation=types[one.name]) for one in own if one.kind is not one.VAR_KEYWORD]
        run.__doc__ = command.__doc__
        return signed(run, [*parameters, *(optional(field, OPTIONS[field].annotation(None)) for field in fields)])

    return with_options


def optional(name: str, annotation: Any) -> inspect.Parameter:
    """Return a parameter that is None if the option is not given."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def signed(command: Command, parameters: Iterable[inspect.Parameter]) -> Command:
    """Give a command these parameters, in the two places where typer looks for them."""
    signature = inspect.Signature(list(parameters))
    command.__signature__ = signature  # type: ignore[attr-defined]  # `inspect` reads this attribute
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return command


def load_of(source: str, **form: Any) -> Load:
    """Return the load of a source with the fields that are given. Raise SettingsError if the source neither exists here nor can be
    downloaded."""
    spec = model_spec(source)
    return msgspec.structs.replace(Load(spec.name, spec.source), **form)
