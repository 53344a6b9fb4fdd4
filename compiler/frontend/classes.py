"""Classification heads: the names of their classes, and how their outputs become scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from compiler.frontend.fields import Fields

TASK = "ForSequenceClassification"  # end of the names in `architectures` of models with a classification head
ACTIVATION_FIELD = "activation_fn"  # a field of sentence-transformers' configuration
MAX_CLASSES = 1 << 16


class Scores(StrEnum):
    """How the outputs of a classification head become scores."""

    SOFTMAX = "softmax"  # each text has exactly one class
    SIGMOID = "sigmoid"  # each text may have several of the classes, or none; or there is only one class
    RAW = "raw"  # the outputs are the scores


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a classification head, in the order of its outputs, and how the outputs become scores."""

    names: tuple[str, ...]
    scores: Scores


def read_classes(fields: Fields) -> Classes | None:
    """Return the classes of a model's head, or None if `architectures` names no model with a classification head. Raise ConfigError if the
    fields of the head are not supported."""
    architectures = fields.raw("architectures", [])
    if not isinstance(architectures, list) or not any(isinstance(name, str) and name.endswith(TASK) for name in architectures):
        return None
    names = _read_names(fields)
    return Classes(names, read_scores(fields, len(names)))


def _read_names(fields: Fields) -> tuple[str, ...]:
    """Return the names in `id2label`, or LABEL_0, LABEL_1 and so on for `num_labels` classes. Raise ConfigError if a name is missing or is
    no text, or if there are too many names."""
    named = fields.raw("id2label")
    if named is None:
        count = fields.integer("num_labels", 2, maximum=MAX_CLASSES)
        return tuple(f"LABEL_{number}" for number in range(count))
    found = named if isinstance(named, Mapping) else {}
    names = [found.get(str(number)) for number in range(len(found))]
    if not 1 <= len(names) <= MAX_CLASSES or not all(isinstance(name, str) for name in names):
        raise fields.error("id2label", f"a name for each class, and at most {MAX_CLASSES} classes")
    return tuple(str(name) for name in names)


def read_scores(fields: Fields, num_classes: int) -> Scores:
    """Return how outputs become scores: by the activation function that the file names, or else as `problem_type` says. If the file has
    neither, or if `problem_type` is `single_label_classification`, several outputs pass through a softmax, and a single output passes
    through a sigmoid. Raise ConfigError for another function or `problem_type`."""
    sentence = fields.raw("sentence_transformers", {})
    activation = sentence.get(ACTIVATION_FIELD) if isinstance(sentence, Mapping) else None
    activation = fields.raw("sbert_ce_default_activation_function", activation)
    if activation is not None:
        match str(activation).rpartition(".")[2]:
            case "Identity":
                return Scores.RAW
            case "Sigmoid":
                return Scores.SIGMOID
            case _:
                raise fields.error("sbert_ce_default_activation_function", "Identity or Sigmoid")
    match fields.raw("problem_type"):
        case None:
            return Scores.SIGMOID if num_classes == 1 else Scores.SOFTMAX
        case "regression":
            return Scores.RAW
        case "multi_label_classification":
            return Scores.SIGMOID
        case "single_label_classification":
            return Scores.SOFTMAX if num_classes > 1 else Scores.SIGMOID
        case _:
            raise fields.error("problem_type", "regression, single_label_classification or multi_label_classification")
