"""Parse PTX text into typed instructions: the PTX that LLVM writes for a module, including inline assembly.

The parser replaces names of registers by slot numbers, also those that inline assembly declares in a scope. Addresses of variables are
resolved at launch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.gpu.ptx.faults import UnknownPtx

WIDTHS = {"8": 8, "16": 16, "32": 32, "64": 64, "128": 128}


@dataclass(frozen=True, slots=True)
class Register:
    name: str
    slot: int
    bits: int  # width of the register in bits; 1 for a predicate


@dataclass(frozen=True, slots=True)
class Special:
    """An operand that is a register set by the hardware, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    value: int  # an integer, or the bits of a float
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """An operand that is the name of a variable, parameter, label or function."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    parts: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Negated:
    """An operand that is a negated predicate: `!%p`."""

    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """A destination `_`, which discards the result."""


Operand = Register | Special | Immediate | Symbol | Address | Vector | Negated | Sink


@dataclass(frozen=True, slots=True)
class Guard:
    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    text: str

    @property
    def type(self) -> str:
        return self.modifiers[-1]


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    space: str  # state space: global, const, shared or local
    alignment: int
    num_bytes: int  # 0 for dynamic shared memory
    initial: bytes | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    offset: int
    num_bytes: int


@dataclass(slots=True)
class Kernel:
    name: str
    parameters: tuple[Parameter, ...]
    max_threads: tuple[int, ...] | None  # the largest allowed block size, given by .maxntid
    required_threads: tuple[int, ...] | None  # the only allowed block size, given by .reqntid
    cluster: tuple[int, ...] | None
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> index of the next instruction
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name of a table of .branchtargets -> its labels
    registers: list[Register] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)  # variables in shared and local memory

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.num_bytes for p in self.parameters), default=0)


@dataclass(frozen=True, slots=True)
class Module:
    target: str
    variables: tuple[Variable, ...]
    kernels: dict[str, Kernel]


COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ENTRY = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.entry\s+([\w$.]+)\s*\(([^)]*)\)([^{;]*)\{")
FUNCTION = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.func\b[^;{]*\{")
VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(global|const|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+"
    r"([\w$.]+)\s*((?:\[\d*\])*)\s*(?:=\s*(\{[^}]*\}|[^;]+))?\s*$"
)
ADDRESS = re.compile(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\d+)|(-\d+))?\s*\]")
BEGIN = re.compile(r"[^\s;]")  # of a statement, label or brace
LABEL = re.compile(r"([$\w]+)\s*:(?!:)\s*")


def parse(ptx: str) -> Module:
    text = COMMENT.sub(" ", ptx.rstrip("\0"))
    target = re.search(r"\.target\s+([\w]+)", text)
    if target is None:
        raise UnknownPtx("a module needs a .target; this text has none")
    kernels: dict[str, Kernel] = {}
    outside, position = [], 0
    for entry in ENTRY.finditer(text):
        end = _closing(text, entry.end())
        kernels[entry[1]] = _Body(_kernel(entry), text[entry.end() : end]).kernel
        outside.append(text[position : entry.start()])
        position = end + 1
    outside.append(text[position:])
    statements = _without_functions(";".join(outside)).split(";")
    variables = [_variable(found) for s in statements if (found := VARIABLE.search(s.strip()))]
    return Module(target[1], tuple(variables), kernels)


def _closing(text: str, start: int) -> int:
    depth = 1
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise UnknownPtx("a brace is never closed")


def _without_functions(text: str) -> str:
    """Remove the functions of the module, because all calls should be inlined. If a kernel still calls a function, compiling the
    instruction `call` fails."""
    while function := FUNCTION.search(text):
        text = text[: function.start()] + ";" + text[_closing(text, function.end()) + 1 :]
    return text


def _kernel(entry: re.Match[str]) -> Kernel:
    parameters, at = [], 0
    for declared in filter(str.strip, entry[2].split(",")):
        found = re.search(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)(.*?)([\w$]+)(?:\[(\d+)\])?\s*$", declared.strip(), re.DOTALL)
        if found is None:
            raise UnknownPtx(f"the parameter declaration {declared.strip()!r} is not supported")
        size = int(found[2]) // 8 * int(found[5] or 1)
        alignment = int(found[1] or int(found[2]) // 8)
        at = -(-at // alignment) * alignment
        parameters.append(Parameter(found[4], at, size))
        at += size
    return Kernel(
        entry[1],
        tuple(parameters),
        max_threads=_dimensions("maxntid", entry[3]),
        required_threads=_dimensions("reqntid", entry[3]),
        cluster=_dimensions("reqnctapercluster", entry[3]),
    )


def _dimensions(name: str, directives: str) -> tuple[int, ...] | None:
    found = re.search(rf"\.{name}\s+(\d+(?:\s*,\s*\d+)*)", directives)
    return None if found is None else tuple(int(n) for n in found[1].split(","))


def _variable(found: re.Match[str]) -> Variable:
    space, alignment, _, bits, name, dimensions, initial = found.groups()
    element = int(bits) // 8
    count = 1
    for extent in re.findall(r"\[(\d*)\]", dimensions):
        count *= int(extent or 0)
    data = None
    if initial is not None:
        data = b"".join(_element(word.strip(), element) for word in initial.strip("{} \n").split(",") if word.strip())
        data = data.ljust(count * element, b"\0")
    return Variable(name, space, int(alignment or element), count * element, data)


def _element(word: str, size: int) -> bytes:
    try:
        return (_number(word).value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    except ValueError as error:
        raise UnknownPtx(f"the initial value {word!r} is not supported") from error


def _number(word: str) -> Immediate:
    if word[:2] in ("0f", "0F", "0d", "0D") and len(word) in (10, 18):
        return Immediate(int(word[2:], 16), is_float=True)
    word = word.rstrip("U")
    return Immediate(int(word, 8) if re.fullmatch(r"0[0-7]+", word) else int(word, 0))


class _Body:
    """Parser for the statements of one kernel."""

    def __init__(self, kernel: Kernel, text: str) -> None:
        self.kernel = kernel
        self._scopes: list[dict[str, Register]] = [{}]
        position = 0
        while begin := BEGIN.search(text, position):
            position = begin.start()
            if text[position] in "{}":
                self._scopes = [*self._scopes, {}] if text[position] == "{" else self._scopes[:-1]
                position += 1
            elif label := LABEL.match(text, position):
                kernel.labels[label[1]] = len(kernel.instructions)
                position = label.end()
            else:
                end = text.index(";", position)
                self._statement(" ".join(text[position:end].split()))
                position = end + 1

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(text)
        elif text.startswith((".shared", ".local")):
            found = VARIABLE.search(text)
            if found is None:
                raise UnknownPtx(text)
            self.kernel.variables.append(_variable(found))
        elif text.startswith(".branchtargets"):
            label = max(self.kernel.labels, key=lambda name: self.kernel.labels[name])
            self.kernel.tables[label] = tuple(name.strip() for name in text.split(None, 1)[1].split(","))
        elif text and not text.startswith((".pragma", ".loc", ".file")):
            self.kernel.instructions.append(self._instruction(text))

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        bits = 1 if kind == ".pred" else int(re.sub(r"\D", "", kind))
        for name in (n.strip() for n in names.split(",")):
            if family := re.fullmatch(r"([%\w$]+)<(\d+)>", name):
                for number in range(int(family[2])):
                    self._scopes[-1][f"{family[1]}{number}"] = self._new(f"{family[1]}{number}", bits)
            else:
                self._scopes[-1][name] = self._new(name, bits)

    def _new(self, name: str, bits: int) -> Register:
        register = Register(name, len(self.kernel.registers), bits)
        self.kernel.registers.append(register)
        return register

    def _find(self, name: str) -> Register | None:
        for scope in reversed(self._scopes):
            if (register := scope.get(name)) is not None:
                return register
        return None

    def _instruction(self, text: str) -> Instruction:
        whole, guard = text, None
        if text[0] == "@":
            name, text = text[1:].split(None, 1)
            register = self._find(name.lstrip("!"))
            if register is None:
                raise UnknownPtx(f"{whole}: the register {name} is not declared")
            guard = Guard(register, name[0] == "!")
        opcode, _, rest = text.partition(" ")
        first, *modifiers = opcode.split(".")
        try:
            operands = tuple(self._operand(word) for word in _commas(rest))
        except (ValueError, UnknownPtx) as error:
            raise UnknownPtx(f"{whole}: {error}") from error
        return Instruction(first, tuple(modifiers), operands, guard, whole)

    def _operand(self, word: str) -> Operand:
        if (register := self._find(word)) is not None:
            return register
        if word == "_":
            return Sink()
        if word[0] == "{":
            return Vector(tuple(self._operand(w) for w in _commas(word[1:-1])))
        if word[0] == "[":
            found = ADDRESS.fullmatch(word)
            if found is None:
                raise UnknownPtx(f"the address {word} is not supported")
            base = self._operand(found[1])
            assert isinstance(base, Register | Symbol | Immediate)
            return Address(base, int(found[2] or found[3] or 0))
        if word[0] == "!":
            register = self._find(word[1:])
            if register is None:
                raise UnknownPtx(f"the register {word[1:]} is not declared")
            return Negated(register)
        if "|" in word:
            return Vector(tuple(self._operand(w.strip()) for w in word.split("|")))
        if word[0] == "%":
            return Special(word[1:])
        if re.match(r"-?\d", word):
            return _number(word)
        if re.fullmatch(r"[$\w.]+", word):
            return Symbol(word)
        raise UnknownPtx(f"the operand {word!r} is not supported")


def _commas(text: str) -> list[str]:
    if "{" not in text and "(" not in text:
        return [word.strip() for word in text.split(",")] if text else []
    words, depth, word = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            words.append(word.strip())
            word = ""
        else:
            word += character
    return [*words, word.strip()] if word.strip() else words
