"""A Jinja environment for untrusted templates: isolated from Python, and bounded in time and memory, on any thread.

A template comes from the network with a model, and processes the messages of clients. Three rules confine it:

1. Everything a template can reach is on a list: kinds of statements, globals, filters, tests, and for each type of value the attributes
   that may be read and the methods that may be called. Types are compared exactly, so an object of any other type has no attributes, cannot
   be called and cannot become text. There is no `Markup`. The only objects with methods written in Python are Jinja's own, such as `loop`
   and `cycler`, of which the lists name the methods that may be called.
2. Between two steps of the meter only a bounded amount of work happens. The syntax tree is rewritten so that each iteration of a loop, each
   macro, each comparison and each output takes a step; calls, filters and arithmetic go through the environment. This is necessary because
   a signal or a watchdog could not interrupt a string operation inside the interpreter.
3. Operations that can take long or create much data (text of nested values, repetition, replacement, padding, joining) are measured before
   they run, and charged to one budget. Operations that cannot be measured are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from types import FunctionType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from server.open_values import created_s
from server.text.templates.filters import metered_filters, metered_tests
from server.text.templates.meter import (
    MAX_INT_BITS,
    SCALARS,
    GroupTuple,
    Meter,
    MeteredContext,
    TemplateLimit,
    TemplateRaise,
    check_key,
    meter_of,
)
from server.text.templates.metered_text import MAX_PADDING, STR_METHODS, call_text, format_percent

# Ordinary templates have one node per seven characters. Compiling a node takes a tenth of a millisecond.
MAX_SOURCE_CHARS = 1 << 16
MAX_NODES = 20_000
MAX_RANGE = 100_000

# --- allowed nodes, methods and functions -----------------------------------------------------------------------------------

STATEMENTS = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock,
    nodes.With, nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue, nodes.Scope,
)  # fmt: skip
EXPRESSIONS = (
    nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr,
    nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand,
    nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg,
    nodes.Pos,
)  # fmt: skip
NODES = frozenset((*STATEMENTS, *EXPRESSIONS))
KEYWORDS: dict[type, str] = {nodes.ScopedEvalContextModifier: "autoescape", nodes.FromImport: "from"}

METHODS: dict[type, frozenset[str]] = {
    str: STR_METHODS,
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    LoopContext: frozenset(("changed", "cycle")),
    Cycler: frozenset(("next", "reset")),
}
ATTRIBUTES: dict[type, frozenset[str]] = {
    LoopContext: frozenset(
        ("depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0")
    ),
    Cycler: frozenset(("current",)),
    GroupTuple: frozenset(("grouper", "list")),
}
INDEXED = frozenset((str, list, tuple, range, GroupTuple))
COMPARING = frozenset(("changed", "count", "get", "index"))  # methods that compare or hash their argument


class Method:
    """A method of a value, before it is called. Only `MeteredEnvironment.call` can call it."""

    __slots__ = ("name", "owner")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name


def _range(_context: Context, *args: int) -> range:
    """The template's `range`. Raise TemplateLimit if the range is too long."""
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimit(f"range() of {len(numbers)} numbers; at most {MAX_RANGE} are allowed")
    return numbers


def _dict(_context: Context, base: object = None, **items: Any) -> dict[str, Any]:
    """The template's `dict`. Raise TypeError if `base` is no mapping."""
    base = {} if base is None else base
    if not isinstance(base, dict):
        raise TypeError(f"dict() is given a {type(base).__name__}; expected a mapping, and named values")
    return {**cast(dict[str, Any], base), **items}


def _namespace(context: Context, base: object = None, **items: Any) -> Namespace:
    """The template's `namespace`: an object whose items the template may set."""
    return Namespace(_dict(context, base, **items))


def _cycler(_context: Context, *items: Any) -> Cycler:
    """The template's `cycler`, which gives its items in turn."""
    return Cycler(*items)


def _joiner(_context: Context, sep: str = ", ") -> Joiner:
    """The template's `joiner`, which gives `sep` at each call but the first."""
    return Joiner(sep)


def _raise_exception(context: Context, message: object) -> NoReturn:
    """The template's `raise_exception`: it refuses the messages."""
    meter_of(context).measure(message)
    raise TemplateRaise(str(message))


def _strftime_now(_context: Context, format: str) -> str:
    """The template's `strftime_now`: the time of the request, in a format. Raise TemplateLimit if the format is too long, or pads too
    far."""
    if len(format) > 256 or re.search(rf"\d{{{len(str(MAX_PADDING)) + 1}}}", format):
        raise TemplateLimit(f"the format of strftime_now is longer than 256 characters or pads to more than {MAX_PADDING}")
    return datetime.fromtimestamp(created_s()).strftime(format)


# Each of these functions takes the context as its first argument.
GLOBALS: dict[str, Callable[..., Any]] = {
    "range": _range,
    "dict": _dict,
    "namespace": _namespace,
    "cycler": _cycler,
    "joiner": _joiner,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
FUNCTIONS = frozenset(GLOBALS.values())

# --- the syntax tree ------------------------------------------------------------------------------------------------------

# The functions that the rewritten tree calls. They are in no table that a template can look names up in: only the tree's rewriting makes
# the node `EnvironmentAttribute`, which no template text parses to, and only `_Generator` writes a call of it.


def _step(context: Context, num_chars: int) -> bool:
    """Take a step, and charge for literal text. Return True, so that a loop's condition can be this step `and` the template's own
    condition."""
    meter_of(context).charge(num_chars)
    return True


def _compared(context: Context, value: object) -> object:
    """Charge for a comparison with a value, and return the value."""
    meter = meter_of(context)
    meter.step(meter.measure(value))
    return value


def _searched(context: Context, value: object) -> object:
    """Charge for a search, except in a dict: looking up a key compares no nested values, and templates often search tool schemas by key."""
    return value if type(value) is dict else _compared(context, value)


def _made(context: Context, value: object) -> object:
    """Charge for a value that was just made, and return it."""
    meter_of(context).charge_value(value)
    return value


def _key(context: Context, value: object) -> object:
    """Return `value`, a key of a dict. Raise TypeError if its type is not allowed for keys."""
    check_key(value)
    return value


def _concat(context: Context, *values: object) -> str:
    """Return the text of all values, one after the other (`~`)."""
    meter = meter_of(context)
    meter.charge(2 * sum(map(meter.measure, values)))
    return "".join(map(str, values))


def _metered(function: Callable[..., Any], value: nodes.Expr, *others: nodes.Expr) -> nodes.Call:
    """Return a call of one of the functions above, which `MeteredEnvironment` has as attributes of the same names."""
    target = nodes.EnvironmentAttribute(function.__name__, lineno=value.lineno)
    return nodes.Call(target, [value, *others], [], None, None, lineno=value.lineno)


class _Generator(CodeGenerator):
    """Writes calls of the meter's functions. `MeteredEnvironment.call` would refuse them."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        """Write a call. A call of one of the meter's functions gets the context, and bypasses `MeteredEnvironment.call`; any other call is
        written as usual."""
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(context")
        for arg in node.args:
            self.write(", ")
            self.visit(arg, frame)
        self.write(")")


class _MeterTree(NodeTransformer):
    """Inserts the meter's steps into a template."""

    def _with_step(self, body: list[nodes.Node]) -> list[nodes.Node]:
        """Prepend a step that charges for the literal text that one iteration may write, because that text never appears as a value."""
        template = nodes.Template(body)
        literal = sum(len(data.data) for data in template.find_all(nodes.TemplateData))
        step = nodes.ExprStmt(_metered(_step, nodes.Const(literal)))
        return [step, *body]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Let each iteration take a step, and each evaluation of the loop's condition."""
        node = cast(nodes.For, self.generic_visit(node))
        node.body = self._with_step(node.body)
        if node.test is not None:
            node.test = nodes.And(_metered(_step, nodes.Const(0)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Let each call of the macro take a step."""
        node = cast(nodes.Macro, self.generic_visit(node))
        node.body = self._with_step(node.body)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """Let each call of the block take a step."""
        node = cast(nodes.CallBlock, self.generic_visit(node))
        node.body = self._with_step(node.body)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Charge for all operands of a comparison."""
        node = cast(nodes.Compare, self.generic_visit(node))
        node.expr = _metered(_compared, node.expr)
        for operand in node.ops:
            operand.expr = _metered(_searched if operand.op in ("in", "notin") else _compared, operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `~` by a metered function."""
        first, *others = cast(nodes.Concat, self.generic_visit(node)).nodes
        return _metered(_concat, first, *others)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charge for slices, which are new values."""
        node = cast(nodes.Getitem, self.generic_visit(node))
        if isinstance(node.arg, nodes.Slice):
            return _metered(_made, node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Check the keys of a dict."""
        node = cast(nodes.Pair, self.generic_visit(node))
        node.key = _metered(_key, node.key)
        return node


# --- the environment ------------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """Supports `{% generation %}`, which marks assistant text for training. The text between its tags is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012  # mutable in the base class, too

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _output(context: Context, value: object) -> str:
    """Charge for a value that the template writes, and return its text."""
    meter = meter_of(context)
    meter.charge(meter.measure(value))
    return str(value)


class MeteredEnvironment(SandboxedEnvironment):
    """The environment that model templates expect: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, plain `tojson`."""

    context_class = MeteredContext
    code_generator_class = _Generator
    _step = staticmethod(_step)
    _compared = staticmethod(_compared)
    _searched = staticmethod(_searched)
    _made = staticmethod(_made)
    _key = staticmethod(_key)
    _concat = staticmethod(_concat)
    intercepted_binops = frozenset(("+", "-", "*", "**", "%", "/", "//"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_output,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters = metered_filters()
        self.tests = metered_tests()
        self.globals = dict(GLOBALS)

    def template(self, source: str) -> jinja2.Template:
        """Compile a template. Raise TemplateLimit if the template or an integer in it is too large, or TemplateSyntaxError if the template
        is malformed or has a statement that is not allowed."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimit(f"the template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed")
        tree = self.parse(source)
        num_nodes = 0
        for node in tree.find_all(nodes.Node):
            num_nodes += 1
            if type(node) not in NODES:
                keyword = KEYWORDS.get(type(node), type(node).__name__.lower())
                raise jinja2.TemplateSyntaxError(f"{keyword!r} is not allowed in a chat template", node.lineno)
            if isinstance(node, nodes.Const) and isinstance(node.value, int) and node.value.bit_length() > MAX_INT_BITS:
                raise TemplateLimit(f"line {node.lineno} holds an integer of more than {MAX_INT_BITS} bits")
        if num_nodes > MAX_NODES:
            raise TemplateLimit(f"the template has {num_nodes} nodes; at most {MAX_NODES} are allowed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # Python's remarks about the generated code, such as on `{{ 3[1:] }}`
            return self.from_string(_MeterTree().visit(tree))

    def rendered(self, template: jinja2.Template, names: Mapping[str, Any], meter: Meter) -> str:
        """Return the text of `template`, whose variables are `names`. The meter is no variable, so no name in the template or in `names`
        can stand for it."""
        context = cast(MeteredContext, template.new_context(dict(names)))
        context.meter = meter
        try:
            return "".join(template.root_render_func(context))
        except Exception:
            self.handle_exception()  # raises the error with the template's own line numbers

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`. A method wins over an item of the same name, as in Jinja."""
        if type(obj) is dict and attribute not in METHODS[dict]:
            return self.getitem(obj, attribute)
        return self.attribute(obj, attribute)

    def attribute(self, obj: Any, name: str) -> Any:
        """Return a method or attribute that METHODS or ATTRIBUTES lists, or an item of a namespace, otherwise an undefined value. Raise
        UndefinedError if `obj` itself is undefined."""
        kind = type(obj)
        if name in METHODS.get(kind, ()):
            return Method(obj, name)
        if name in ATTRIBUTES.get(kind, ()):
            return getattr(obj, name)
        if kind is Namespace:
            items: dict[str, Any] = object.__getattribute__(obj, "_Namespace__attrs")
            return items[name] if name in items else self.undefined(obj=obj, name=name)
        if isinstance(obj, Undefined):
            return obj._fail_with_undefined_error()  # pyright: ignore[reportPrivateUsage]
        return self.undefined(obj=obj, name=name)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]`. If there is no such item, return the attribute or the method of this name, or else an undefined value. An
        item wins over a method of the same name, as in Jinja. Raise TypeError if `argument` may not be a key."""
        kind = type(obj)
        check_key(argument)
        if kind is dict and argument in obj:
            return obj[argument]
        if kind in INDEXED and isinstance(argument, int):
            return obj[argument] if -len(obj) <= argument < len(obj) else self.undefined(obj=obj, name=str(argument))
        if isinstance(argument, str) or isinstance(obj, Undefined):
            return self.attribute(obj, argument)
        return self.undefined(obj=obj, name=argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method or function that templates may call, and charge for its result if that is a new value. Raise TypeError for anything
        else."""
        meter = meter_of(context)
        meter.step()
        kwargs = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}  # arguments that Jinja adds
        kind = type(obj)
        if kind is Method:
            return _call_method(meter, obj.owner, obj.name, args, kwargs)
        if kind is FunctionType and obj in FUNCTIONS:
            result = obj(context, *args, **kwargs)
        elif kind is Macro:
            result = obj(context.eval_ctx, *args, **kwargs)
        elif kind in (LoopContext, Joiner):
            result = obj(*args, **kwargs)
        elif isinstance(obj, Undefined):
            return obj._fail_with_undefined_error()  # pyright: ignore[reportPrivateUsage]
        else:
            raise TypeError(f"a {kind.__name__} cannot be called")
        meter.charge_value(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of a binary operation of numbers, of two sequences of one type, of a sequence and a number, or `text % values`.
        Raise TypeError for other operands, or TemplateLimit if the result would be too large."""
        meter = meter_of(context)
        meter.step()
        kinds = (type(left), type(right))
        if operator == "%" and kinds[0] is str:
            return format_percent(meter, left, right)
        if operator == "*" and (length := _repeated(left, right) or _repeated(right, left)):
            meter.charge(8 * length)
        elif operator == "+" and kinds[0] is kinds[1] and kinds[0] in (str, list, tuple):
            pass  # the result is no larger than both operands together
        elif not all(kind in SCALARS or issubclass(kind, Undefined) for kind in kinds):
            raise TypeError(f"unsupported operand types for {operator}: {kinds[0].__name__!r} and {kinds[1].__name__!r}")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INT_BITS:
            raise TemplateLimit(f"{left} ** {right} has more than {MAX_INT_BITS} bits")
        result = super().call_binop(context, operator, left, right)
        meter.charge_value(result)
        return result


def _repeated(value: Any, times: Any) -> int:
    """Return the length of `value * times`, at least 1, or 0 if the operation is no repetition."""
    is_repetition = type(value) in (str, list, tuple) and isinstance(times, int)
    return max(1, len(value) * times) if is_repetition else 0


def _call_method(meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method that METHODS lists. Charge for its comparisons, and for a text or a copy that it makes."""
    if type(owner) is str:
        return call_text(meter, name, owner, args, kwargs)
    if name in COMPARING:
        for arg in args:
            meter.step(meter.measure(arg))
        if name in ("count", "index"):
            meter.step(meter.measure(owner))
    result = getattr(owner, name)(*args, **kwargs)
    if name == "copy":
        meter.charge_value(result)
    return result
