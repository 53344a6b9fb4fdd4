"""Quantise the matrices of a model to a number of bits per weight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.mixture import Mixture
from compiler.frontend.quantized.held import Width
from deploy.model_loading.files import ModelFiles
from deploy.model_loading.known import Progress
from deploy.quality.observe import Bound, Observer, mean_squares, windows_of
from deploy.quantizing.kept import Result, heads_of
from deploy.quantizing.matrices import Search, values_of
from deploy.quantizing.mix import Unit, choose, fitting, measured_width
from deploy.quantizing.sensitivity import Kind, divergences, kind_of

STAGE = "quantise"
# Maximum number of multiplications that measuring the inputs may take, unless LEAST_PARTS short windows need more. Measuring the
# sensitivities may take twice as many.
MOST_WORK = 5e12
SHORT = 128  # length of the windows if long ones would be too few
LEAST_PARTS = 4  # least number of windows on which the inputs are measured
SENSED_TOKENS, SENSED_ROWS = 256, 128  # length of the text that sensitivities are measured on, and tokens whose predictions are compared
LEAST_SENSED = 64  # least length of the text that sensitivities are measured on
HEAD = Width(6, 32)  # errors of the head affect the logits directly
VALUES = "v_proj.weight"  # ending of the names of matrices whose width may differ from that of other matrices that read the same input
LEAST_SHARE = 1e-4  # least importance of an input, relative to the mean of all inputs

Array = NDArray[Any]
Floats = NDArray[np.float32]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is being quantised."""

    files: ModelFiles
    importance: Mapping[str, Floats]  # importance of the inputs, by the name of the matrix
    groups: Sequence[tuple[str, ...]]  # names of matrices that read the same input
    search: Search
    widths: Sequence[Width]  # widths that matrices of the layers may have

    @property
    def measured_width(self) -> Width:
        return measured_width(self.widths)

    def weight(self, name: str) -> Array:
        return self.files.weights.read(name)

    def parts(self, name: str, width: Width) -> tuple[dict[str, Array], float]:
        """Quantise a matrix to this width. Return the arrays that represent it, and the sum of the errors of its rows."""
        found = self.search.parts(self.weight(name), self.importance[name], width)
        self.files.weights.release(name)
        return found


def quantise(files: ModelFiles, budget: float, widths: Sequence[Width], tokens: Sequence[int], progress: Progress) -> Result:
    """Quantise the matrices of the layers to `budget` bits per weight, each in one of these widths, and the head to 6 bits. Matrices whose
    rows are no multiples of 32 numbers stay as they are."""
    report = partial(progress, STAGE)
    report(0.0)
    observer = Observer(files, SENSED_ROWS)
    num_weights = num_multiplied(files, observer.names)
    windows = affordable(tokens, observer.window, num_weights)
    log.info("%s is quantised on %d of %d tokens of the text", files.path.name, sum(map(len, windows)), len(tokens))
    with observer.bound(files.weights) as bound:
        squares = mean_squares(bound, windows)
        report(0.2)
        importance = {name: _important(s) for names, s in zip(observer.names, squares, strict=True) for name in names}
        tensors = files.weights.tensors
        groups = [names for names in observer.names if _fits(names, tensors)]
        heads = heads_of(files.config, tensors)
        layers = [part for names in groups if names[0] not in heads for part in apart(names)]
        model = Model(files, importance, layers, Search(), widths)
        try:
            plain = _plain(model, lambda done: report(0.2 + 0.3 * done))
            kinds = {kind_of(names, files.config.num_layers) for names in layers}
            middle = windows[len(windows) // 2]
            sensed = middle[: min(SENSED_TOKENS, max(LEAST_SENSED, int(2 * MOST_WORK / max(1, num_weights * len(kinds)))))]
            units = _units(model, plain, bound, sensed, lambda done: report(0.5 + 0.4 * done))
            chosen = choose(units, budget)
            parts = {name: arrays for name, (arrays, _) in plain.items()}
            found = {name: width for unit, width in zip(units, chosen, strict=True) for name in unit.names}
            parts |= {name: model.parts(name, width)[0] for name, width in found.items() if width != model.measured_width}
            for names in groups:
                if (head := heads.get(names[0])) is not None:
                    found[head], parts[head] = HEAD, model.parts(names[0], HEAD)[0]
        finally:
            model.search.close()
    report(1.0)
    return Result(found, parts)


def _fits(names: Sequence[str], tensors: Mapping[str, Any]) -> bool:
    """Return whether the files have all of these matrices, and their rows can be divided into groups of HEAD.group numbers."""
    return all(name in tensors and tensors[name].shape[-1] % HEAD.group == 0 for name in names)


def affordable(tokens: Sequence[int], window: int, num_weights: int) -> list[Sequence[int]]:
    """Return windows of a text on which the inputs of a model's matrices are measured. A token multiplies `num_weights` weights. If
    `MOST_WORK` does not suffice for the whole text, the windows are spread over the text, and they are short if there would be fewer than
    `LEAST_PARTS` long ones."""
    room = int(MOST_WORK / max(1, num_weights))  # in tokens
    length = window if room >= min(len(tokens), LEAST_PARTS * window) else min(window, SHORT)
    windows = windows_of(tokens, length)
    count = min(len(windows), max(LEAST_PARTS, room // length))
    return [windows[(2 * i + 1) * len(windows) // (2 * count)] for i in range(count)]


def num_multiplied(files: ModelFiles, groups: Sequence[Sequence[str]]) -> int:
    """Return how many weights of these matrices a token multiplies: all of a matrix, and those of the chosen experts."""
    tensors, mixture = files.weights.tensors, files.config.mixture
    return sum(_num_multiplied(tensors[name].shape, mixture) for names in groups for name in names if name in tensors)


def _num_multiplied(shape: tuple[int, ...], mixture: Mixture | None) -> int:
    if mixture is None or len(shape) < 3:
        return prod(shape)
    return prod(shape) * mixture.num_chosen // mixture.num_experts  # [experts, outputs, inputs]


def apart(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Divide matrices that read the same input into groups: the value projection (VALUES), and all others. All matrices of a group get one
    width, so that one product can multiply them."""
    groups = (tuple(name for name in names if name.endswith(VALUES) is own) for own in (False, True))
    return [group for group in groups if group]


def _important(squares: Floats) -> Floats:
    """Return the importance of inputs, rounded so that the last bits of the squares, which may differ between machines, do not change the
    quantised numbers."""
    if not squares.any():
        return np.ones_like(squares)
    mantissa, exponent = np.frexp(np.maximum(squares, LEAST_SHARE * squares.mean()))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)


def _coarse(value: float) -> float:
    """Round a divergence to three digits, so that differences in the last bits between machines do not decide about widths."""
    return float(f"{value:.2e}")


def _plain(model: Model, report: Callable[[float], None]) -> dict[str, tuple[dict[str, Array], float]]:
    """Quantise all matrices of the layers to the measured width. Return the arrays of each and the sum of its errors."""
    found: dict[str, tuple[dict[str, Array], float]] = {}
    for done, names in enumerate(model.groups):
        found |= {name: model.parts(name, model.measured_width) for name in names}
        report((done + 1) / len(model.groups))
    return found


def _units(
    model: Model,
    plain: Mapping[str, tuple[dict[str, Array], float]],
    bound: Bound,
    window: Sequence[int],
    report: Callable[[float], None],
) -> list[Unit]:
    """Return the units with the divergence that each width is expected to cause: the measured divergence of the unit's kind, divided among
    the units of the kind in proportion to the errors of their products, relative to the products' results."""
    num_layers, kinds = model.files.config.num_layers, dict[Kind, list[str]]()
    for names in model.groups:
        kinds.setdefault(kind_of(names, num_layers), []).extend(names)
    measured = divergences(
        bound, model.files.weights, lambda name: values_of(plain[name][0], model.measured_width), kinds, window, SENSED_ROWS, report
    )
    errors = {names: _relative_errors(model, plain, names) for names in model.groups}
    of_kinds = dict.fromkeys(kinds, 0.0)
    for names in model.groups:
        of_kinds[kind_of(names, num_layers)] += errors[names][model.measured_width]
    return [
        Unit(
            names,
            (shape := model.files.weights.tensors[names[0]].shape)[-1],
            sum(prod(model.files.weights.tensors[name].shape) for name in names),
            {
                width: _coarse(measured[kind] * error / (of_kinds[kind] or 1.0))  # 0 if the kind has no errors
                for kind in [kind_of(names, num_layers)]
                for width, error in errors[names].items()
                if width in fitting(model.widths, shape[-1])
            },
        )
        for names in model.groups
    ]


def _relative_errors(model: Model, plain: Mapping[str, tuple[dict[str, Array], float]], names: Sequence[str]) -> dict[Width, float]:
    """Return, for each width, the expected squared error of the products, relative to the expected squares of the products. The error is 0
    for a width that the rows cannot have. Errors of other widths than the measured one are estimated from samples of the rows."""
    totals = dict.fromkeys(model.widths, 0.0)
    power = 0.0
    for name in names:
        w, importance = model.weight(name), model.importance[name]
        power += float((np.square(w, dtype=np.float32).reshape(-1, w.shape[-1]).sum(0) * importance).sum())
        for width in fitting(model.widths, w.shape[-1]):
            totals[width] += plain[name][1] if width == model.measured_width else model.search.sampled_error(w, importance, width)
    return {width: total / power if power else 0.0 for width, total in totals.items()}
