"""Decide from its configuration, its special tokens and the headers of its weights whether a source can be served. `serve`, `inspect`,
`compile` and `generate` share this check, which refuses a model before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from compiler.frontend.accounting import require_weights
from compiler.frontend.errors import ModelError, WeightMismatch
from compiler.ir.module import IRModule
from compiler.machine.target import Target, TargetError, of_gpu, runnable
from deploy.model_loading.files import ModelFiles, open_files
from deploy.model_loading.locate import locate
from deploy.model_loading.modes import Mode, mode_of
from deploy.model_loading.tokenizer import TokenizerSource
from deploy.quantizing.kept import opened
from runtime.device.cuda.card import capability_of
from runtime.device.registry import CPU, number_of
from runtime.errors import NoDevice
from server.interfaces import LoadError
from server.messages import FETCH, ErrorCode, Load
from server.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]  # called with the current stage of a load and the completed fraction of that stage


def silent(stage: str, fraction: float) -> None:
    """Ignore the progress of a load."""


@dataclass(frozen=True)
class Servable:
    files: ModelFiles
    eos_ids: tuple[int, ...]  # ids of the tokens that end an answer
    tokenizer_source: TokenizerSource
    mode: Mode
    module: IRModule
    target: Target

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises LoadError if it is missing or damaged. A worker does not need it."""
        return self.tokenizer_source.build()


def require_servable(load: Load, progress: Progress) -> Servable:
    """Open the source and return what a load needs. Raise LoadError if it cannot be served."""
    progress(FETCH, 0.0)
    target = _target_of(load)
    files = open_files(locate(load.source, partial(progress, FETCH), load.hub_token))
    progress("verify", 0.0)
    tokenizer_source = TokenizerSource(files.path, files.gguf)
    eos_ids = tokenizer_source.eos_ids()
    try:
        files = opened(files, load.quantize, load.calibrate, progress)
        mode = mode_of(files, load)
        module = mode.module()
        require_weights(module, mode.weights, mode.unused)
    except WeightMismatch as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{error}{_task(files)}") from error
    except ModelError as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, str(error)) from error
    return Servable(files, eos_ids, tokenizer_source, mode, module, target)


def _target_of(load: Load) -> Target:
    try:
        if load.device == CPU:
            return runnable(load.target)
        return of_gpu(load.target, capability_of(number_of(load.device)))
    except (TargetError, NoDevice) as error:
        raise LoadError(ErrorCode.INVALID_VALUE, str(error)) from error


def _task(files: ModelFiles) -> str:
    """Explain why weights are unused, if they belong to an unsupported classification head."""
    classifiers = [name for name in files.architectures if "ForSequenceClassification" in name or "ForTokenClassification" in name]
    if not classifiers:
        return ""
    remedy = "use a model that classifies whole texts, generates text or computes embeddings"
    return f". The model is a {classifiers[0]}: its classification head is not supported; {remedy}"
