"""Whether a source can be served, from its configuration, its tokenizer and the headers of its weights: the one check of `serve`,
`inspect`, `compile` and `generate`. What it refuses is refused before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from compiler.frontend.accounting import require_weights
from compiler.frontend.errors import ModelError, WeightMismatch
from compiler.ir.module import IRModule
from compiler.machine.target import Target, TargetError, runnable
from deploy.loading.files import ModelFiles, open_files
from deploy.loading.locate import locate
from deploy.loading.modes import Mode, mode_of
from deploy.loading.tokenizer import tokenizer_of
from server.interfaces import LoadError
from server.messages import ErrorCode, Load
from server.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]  # told the stage of a load, and how much of it is done


def silent(stage: str, fraction: float) -> None:
    """For those who do not watch."""


@dataclass(frozen=True, slots=True)
class Servable:
    files: ModelFiles
    tokenizer: Tokenizer
    mode: Mode
    module: IRModule
    target: Target


def require_servable(load: Load, progress: Progress) -> Servable:
    """Raises LoadError."""
    progress("fetch", 0.0)
    target = _target_of(load)
    files = open_files(locate(load.source, partial(progress, "fetch"), load.hub_token))
    progress("verify", 0.0)
    tokenizer = tokenizer_of(files)
    mode = mode_of(files, load)
    try:
        module = mode.module()
        require_weights(module, files.weights, mode.unused)
    except WeightMismatch as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{error}{_task(files)}") from error
    except ModelError as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, str(error)) from error
    return Servable(files, tokenizer, mode, module, target)


def _target_of(load: Load) -> Target:
    try:
        return runnable(load.target)
    except TargetError as error:
        raise LoadError(ErrorCode.INVALID_VALUE, str(error)) from error


def _task(files: ModelFiles) -> str:
    """Weights that are left over are often the head of a task that nobody serves."""
    classifiers = [name for name in files.architectures if "ForSequenceClassification" in name or "ForTokenClassification" in name]
    if not classifiers:
        return ""
    return f". The model is a {classifiers[0]}: rerankers and classifiers are not served; take a model that generates text or embeds it"
