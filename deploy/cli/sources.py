"""Arguments of the commands that take a model: the model's source, the format of its weights, its limits."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import typer

from deploy.settings import model_spec, num_bytes_or_share
from runtime.device.registry import CPU
from runtime.device.registry import NAME as DEVICE_NAME
from server.load_settings import LEAST_CONTEXT, MOST_RANKS, MOST_SEQUENCES
from server.messages import Load

QUANTIZE = (
    "Number format of the weights: auto (that of the files), bf16, int8, 6bit, 5bit, 4bit, a number of bits such as 4.6, f32, auto-fast, "
    "int8-fast, int8-128, int4-32 (docs/models.md)."
)
CALIBRATE = "Text by which 4bit and other numbers of bits decide what matters."
MAX_CONTEXT = "Longest sequence, in tokens; by default the model's, if memory suffices."
MAX_BATCH = "Maximum number of sequences per step."
MAX_GAP_MS = "Longest pause of a stream, in milliseconds, while prompts of other requests are prefilled."
KV_DTYPE = "Number format of keys and values: auto, f32, f16, bf16, int8."
NUMERICS = "Numbers of products: portable (equal on all CPUs), fast, or auto (by the weights)."
TARGET = "Instruction set to use: host, or a smaller one such as x86-64-v3."
DEVICE = "Device that runs the model: cpu, cuda, or one of several GPUs such as cuda:1."
TENSOR_PARALLEL = "Number of GPUs that compute each layer together, from --device on."
STAGES = "Divide the layers: 2, or HOST:PORT,local."
EMBEDDINGS = "Serve embeddings of a decoder, too."
LABEL = "Measure the quality label before serving."

KV_CACHE_BYTES = "Memory for keys and values: 2G, or 50% of what the weights leave."
ALIAS = "Further name; may be repeated."
PIN = "Refuse to unload without --force."
TOOL_PARSER = "Format of tool calls, such as hermes or mistral; by default that of the chat template."
DEFAULT = "Default for requests, such as temperature=0.2 or system=@FILE."
REASONING = "Whether the model writes think blocks; by default as its vocabulary says."

Source = Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, 'demo', or a name in `ls --available`.")]
Quantize = Annotated[str, typer.Option(help=QUANTIZE)]
Calibrate = Annotated[str, typer.Option(help=CALIBRATE, metavar="FILE", show_default=False)]
MaxContext = Annotated[int | None, typer.Option(min=LEAST_CONTEXT, help=MAX_CONTEXT)]
MaxBatch = Annotated[int, typer.Option(min=1, max=MOST_SEQUENCES, help=MAX_BATCH)]
KvDtype = Annotated[str, typer.Option(help=KV_DTYPE)]
Numerics = Annotated[str, typer.Option(help=NUMERICS)]
Target = Annotated[str, typer.Option(help=TARGET)]
Device = Annotated[str, typer.Option(help=DEVICE)]
TensorParallel = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help=TENSOR_PARALLEL)]
KvCacheBytes = Annotated[str | None, typer.Option(help=KV_CACHE_BYTES, metavar="BYTES")]


def load_of(
    source: str,
    quantize: str,
    max_context: int | None,
    max_batch: int,
    kv_cache_bytes: str | None,
    kv_dtype: str,
    target: str = "host",
    device: str = CPU,
    calibrate: str = "",
    numerics: str = "auto",
    tensor_parallel: int = 1,
) -> Load:
    try:
        size = None if kv_cache_bytes is None else num_bytes_or_share(kv_cache_bytes)
    except ValueError:
        raise typer.BadParameter(
            f"{kv_cache_bytes!r} is not a number of bytes; expected a number such as 1000000, 64M or 2G, or 50%"
        ) from None
    spec = model_spec(source)
    if not re.fullmatch(DEVICE_NAME, device):
        raise typer.BadParameter(f"device is {device!r}; expected cpu, cuda, or one of several GPUs as cuda:1")
    form = {"kv_cache_bytes": size, "kv_dtype": kv_dtype, "target": target, "device": device, "calibrate": calibrate}
    form |= {"numerics": numerics, "tensor_parallel": tensor_parallel}
    return msgspec.structs.replace(Load(spec.name, spec.source, quantize, max_context, max_batch), **form)
