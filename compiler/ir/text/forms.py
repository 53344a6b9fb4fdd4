"""Forms: constructs of the text that consist of words and operands in a fixed order. A form is declared once; the printer writes it, and
the parser reads it.

In the text of a form, `{field:kind}` stands for a field of the node; printer and parser have a function for each kind. If two words follow
the colon, as in `{offset:at dim}`, the operand is optional: the text has the word `at` and the operand, or neither if the field is None or
empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from compiler.ir.graph.values import Alloc, CallLibrary, CallTir, Launch, MatchCast
from compiler.ir.loops import scalars

_OPERAND = re.compile(r"\{(\w+):([\w ]+)\}")
_WORD = re.compile(r"\w+|->|\S")


class Form:
    """The form of one node type. `print` writes a node; `LoopParser.form` reads one."""

    def __init__(self, node: type, text: str, **unsaid: object) -> None:
        first, *others = _OPERAND.split(text)
        self.node = node
        # values of the fields that a text does not state: fields that the form does not name, and optional operands that the text leaves
        # out
        self.unsaid = unsaid
        self.first = first
        self.name = (words_of(first) or [node.__name__.lower()])[0]
        # the operands after the first words, each as: field, optional word, kind, and the words after the operand
        self.operands = [(field, *_parted(kind), words) for field, kind, words in zip(*(others[i::3] for i in range(3)), strict=True)]

    def print(self, node: object, kinds: Mapping[str, Callable[[Any], str]]) -> str:
        text = self.first
        for field, word, kind, words in self.operands:
            value = getattr(node, field)
            if not word:
                text += kinds[kind](value)
            elif value not in (None, ()):
                text += f" {word} {kinds[kind](value)}"
            text += words
        return text


def words_of(text: str) -> list[str]:
    """Split a text of a form into words and marks, as the lexer does."""
    return _WORD.findall(text)


def _parted(kind: str) -> tuple[str, str]:
    """Split what follows the colon of an operand into the optional word, or "", and the kind."""
    word, _, rest = kind.rpartition(" ")
    return word, rest


CALL_TIR = Form(CallTir, "call_tir {func:function}{args:arguments} -> {out:outputs}")
CALL_TIR_INPLACE = Form(CallTir, "call_tir_inplace {func:function}{args:arguments} {inplace:reused} -> {out:outputs}")
LAUNCH = Form(Launch, "launch {func:function}{args:arguments}{attrs:attrs}")
LAUNCH_LIBRARY = Form(Launch, "launch library {func:string}{args:arguments}{attrs:attrs}", library=True)
REDUCE = Form(scalars.Reduce, "{fn:reduction}({axes:axes}) {value:whole}")
_VALUES = (
    CALL_TIR,
    CALL_TIR_INPLACE,
    Form(CallLibrary, "call_library {name:string}{args:arguments}{attrs:attrs} -> {out:outputs}"),
    Form(MatchCast, "match_cast {value:atom} to {type:defining}{boundary:boundary}"),
    Form(Alloc, "alloc {type:type}{offset:at dim}"),
)
_GROUPED = "contract_groups({axes:axes}) {dots:dots}{begins:from wholes}{two_planes:when whole} by {factor:whole}{term:beside whole}"
_SCALARS = (
    Form(scalars.DimScalar, "dim({dim:dim})"),
    Form(scalars.Cast, "cast({dtype:dtype}, {value:part})"),
    Form(scalars.Guard, "guard({conditions:conditions} ? {value:part} : {otherwise:part})"),
    Form(scalars.Contraction, "contract({axes:axes}) {rows:whole} by {columns:whole}"),
    Form(scalars.GroupedContraction, _GROUPED, begins=()),
    Form(scalars.Element, "stored({format:format}, {k:dim}, {stored:parts})"),
)
VALUES = {form.name: form for form in _VALUES}
SCALARS = {form.name: form for form in _SCALARS}
_BY_NODE = {form.node: form for form in (*_VALUES, *_SCALARS, REDUCE)}


def form_of(node: object) -> Form:
    """Return the form of a node. Raise KeyError if nodes of this type have none."""
    match node:
        case CallTir(inplace=inplace):
            return CALL_TIR_INPLACE if inplace else CALL_TIR
        case Launch(library=library):
            return LAUNCH_LIBRARY if library else LAUNCH
        case _:
            return _BY_NODE[type(node)]
