"""A Jinja environment for templates that nobody vouches for: bounded in time and memory, on any thread.

A template arrives with a model from the network. Jinja's own sandbox keeps it away from Python; it does not keep it from running
for ever or from asking for a terabyte. A signal or a watchdog cannot interrupt a string operation inside the interpreter, so
the work is metered instead, and two rules make the meter see everything:

1. Between two steps of the meter only a bounded amount of work happens. The syntax tree is rewritten so that each turn of a loop,
   each macro, each comparison and each output takes a step; calls, filters and arithmetic pass through the environment.
2. What can take or make much (text out of nested values, repetition, replacement, padding, joining) is measured before it
   is done, and charged against one budget. What cannot be measured is not on the lists of allowed filters, tests and methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from server.text.meter import MAX_INT_BITS, TemplateLimit, TemplateRaise, meter_of
from server.text.template_filters import (
    CONTAINER_METHODS,
    MAX_PADDING_DIGITS,
    STR_METHODS,
    call_text,
    format_braces,
    format_percent,
    metered_filters,
    metered_tests,
)

# Ordinary templates have a node per seven characters. Compiling one takes a tenth of a millisecond.
MAX_SOURCE_CHARS = 1 << 16
MAX_NODES = 20_000
MAX_RANGE = 100_000

# --- globals --------------------------------------------------------------------------------------------------------------


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimit(f"range() of {len(numbers)} numbers; at most {MAX_RANGE} are allowed")
    return numbers


def _dict(base: object = None, **items: Any) -> dict[str, Any]:
    base = {} if base is None else base
    if not isinstance(base, Mapping):
        raise TemplateLimit("dict() takes a mapping and named values only")
    return {**cast(Mapping[str, Any], base), **items}


def _namespace(base: object = None, **items: Any) -> Namespace:
    return Namespace(_dict(base, **items))


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRaise(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256 or re.search(rf"\d{{{MAX_PADDING_DIGITS + 1}}}", format):
        raise TemplateLimit("the format of strftime_now is longer than 256 characters or pads to more than 999")
    return datetime.now().strftime(format)


# --- the syntax tree ------------------------------------------------------------------------------------------------------

# Names of filters that only the rewriting below can write: most are no identifiers, and `step` costs without doing anything.
STEP, COMPARED, SEARCHED, MADE, KEY, CONCAT = "step", "compared value", "searched value", "made value", "key value", "joined text"


@pass_context
def _step(context: Context, num_chars: int) -> bool:
    meter_of(context).charge(num_chars)
    return True


@pass_context
def _compared(context: Context, value: object) -> object:
    meter = meter_of(context)
    if isinstance(value, list | tuple | dict):
        meter.measure(value)
    meter.step()
    return value


@pass_context
def _searched(context: Context, value: object) -> object:
    """Finding a key in a dict compares nothing inside of it, and tool schemas are searched by key all the time."""
    return value if isinstance(value, dict) else _compared(context, value)


@pass_context
def _made(context: Context, value: object) -> object:
    meter_of(context).charge_value(value)
    return value


@pass_context
def _key(context: Context, value: object) -> object:
    if isinstance(value, tuple):
        raise TemplateLimit("a tuple cannot be a key")
    return value


@pass_context
def _concat(context: Context, *values: object) -> str:
    meter = meter_of(context)
    meter.charge(2 * sum(map(meter.measure, values)))
    return "".join(map(str, values))


TREE_FILTERS: dict[str, Callable[..., Any]] = {
    STEP: _step,
    COMPARED: _compared,
    SEARCHED: _searched,
    MADE: _made,
    KEY: _key,
    CONCAT: _concat,
}


def _filtered(value: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class _MeterTree(NodeTransformer):
    """Puts the meter's steps into a template."""

    def _with_step(self, body: list[nodes.Node]) -> list[nodes.Node]:
        """A turn costs the literal text it may write: that text is never seen as a value."""
        template = nodes.Template(body)
        literal = sum(len(data.data) for data in template.find_all(nodes.TemplateData))
        step = nodes.ExprStmt(_filtered(nodes.Const(literal), STEP))
        return [step, *body]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = cast(nodes.For, self.generic_visit(node))
        node.body = self._with_step(node.body)
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(0), STEP), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        node = cast(nodes.Macro, self.generic_visit(node))
        node.body = self._with_step(node.body)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        node = cast(nodes.CallBlock, self.generic_visit(node))
        node.body = self._with_step(node.body)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        node = cast(nodes.Compare, self.generic_visit(node))
        node.expr = _filtered(node.expr, COMPARED)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, SEARCHED if operand.op in ("in", "notin") else COMPARED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        first, *others = cast(nodes.Concat, self.generic_visit(node)).nodes
        return _filtered(first, CONCAT, *others)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node = cast(nodes.Getitem, self.generic_visit(node))
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, MADE)
        node.arg = _filtered(node.arg, KEY)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        node = cast(nodes.Pair, self.generic_visit(node))
        node.key = _filtered(node.key, KEY)
        return node


# --- the environment ------------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# What a template may ask attributes of, beside text and containers.
OPEN_TYPES = (BlockReference, Cycler, Joiner, LoopContext, Macro, Namespace, Undefined, range)


@pass_context
def _output(context: Context, value: object) -> str:
    meter = meter_of(context)
    meter.charge(meter.measure(value))
    return str(value)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """As model templates expect it: blocks trimmed, loop controls, `raise_exception`, `strftime_now`, plain `tojson`."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_output,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters = metered_filters() | TREE_FILTERS
        self.tests = metered_tests()
        self.globals = {
            "range": _range,
            "dict": _dict,
            "namespace": _namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def template(self, source: str) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimit(f"the template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed")
        tree = self.parse(source)
        if (num_nodes := sum(1 for _ in tree.find_all(nodes.Node))) > MAX_NODES:
            raise TemplateLimit(f"the template has {num_nodes} nodes; at most {MAX_NODES} are allowed")
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, int) and constant.value.bit_length() > MAX_INT_BITS:
                raise TemplateLimit(f"line {constant.lineno} holds an integer of more than {MAX_INT_BITS} bits")
        return self.from_string(_MeterTree().visit(tree))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in STR_METHODS
        for container, methods in CONTAINER_METHODS.items():
            if isinstance(obj, container):
                return attr in methods
        return isinstance(obj, OPEN_TYPES) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format is met in `call`, as all methods of str are."""
        return

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(__context)
        meter.step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(__obj, BuiltinMethodType) and isinstance(owner, str):
            kwargs = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}  # Jinja's own
            if name == "format":
                return format_braces(meter, owner, args, kwargs)
            return call_text(meter, name, owner, *args, **kwargs)
        if isinstance(owner, list | tuple | dict | LoopContext):  # these compare, or hash, what they are given
            meter.measure(args)
            if name in ("count", "index"):
                meter.measure(owner)
        result = super().call(__context, __obj, *args, **kwargs)
        meter.charge_value(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = meter_of(context)
        if operator == "%" and isinstance(left, str):
            return format_percent(meter, left, right)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    meter.charge(8 * len(value) * max(times, 0))
        is_power = operator == "**" and isinstance(left, int) and isinstance(right, int)
        if is_power and left.bit_length() * right > MAX_INT_BITS:
            raise TemplateLimit(f"{left} ** {right} has more than {MAX_INT_BITS} bits")
        result = super().call_binop(context, operator, left, right)
        meter.charge_value(result)
        return result
