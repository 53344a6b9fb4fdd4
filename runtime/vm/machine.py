"""The virtual machine: four instructions over registers, a shape heap per call, and the planned arena.

Loading turns each instruction into a closure, so running is a loop over closures. A closure returns None to continue with the next
instruction, or the index of the instruction to jump to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, assert_never

from runtime.device.base import Code, Derive, Device, HeapHandle, Memory, Region, Tensor
from runtime.errors import ArgumentMismatch, InvalidProgram, TooDeep, UnknownName
from runtime.executable import (
    Arg,
    Call,
    ConstantRef,
    DimRef,
    Executable,
    Goto,
    If,
    Imm,
    Instruction,
    Reg,
    Ret,
    Slot,
    VMFunction,
)
from runtime.library import routine
from runtime.memory import Arena, Aside, MemoryAccount
from runtime.parts import InParts
from runtime.vm.matching import INT64, Item, Match, mentions_slots
from runtime.vm.profile import Profile
from runtime.vm.replay import Replay, result_of

MAX_DEPTH = 100  # maximum number of nested calls

Step = Callable[["Frame"], int | None]  # runs an instruction; returns the index of the instruction to jump to, if any
Read = Callable[["Frame"], Any]  # returns the value of an operand
# Makes the step of a call of a builtin, given the operands and the register of the result; None: the result is not stored.
Builtin = Callable[["Loader", tuple[Arg, ...], int | None], Step]

_RETURNED = -1  # a step returns this in place of an index when the function returns


class Frame:
    """The state of one call. Later calls reuse the object."""

    __slots__ = ("arena", "heap", "heap_handle", "registers", "result")
    heap: memoryview
    heap_handle: HeapHandle

    def __init__(self, device: Device, registers: list[Any], num_slots: int, literals: Sequence[int], no_arena: Memory) -> None:
        self.registers = registers
        self.heap, self.heap_handle = device.heap([*[0] * num_slots, *literals, 0])
        self.arena = no_arena
        self.result: Any = None


class Function:
    """A loaded function, with its bound weights."""

    def __init__(self, machine: Machine, source: VMFunction, builtins: Mapping[str, Builtin]) -> None:
        """Compile the instructions of a function. Raise InvalidProgram or UnknownName if our compiler would not emit such instructions."""
        self.source = source
        self._machine = machine
        self._num_inputs = len(source.inputs)
        if any(p.weight for p in source.params[: self._num_inputs]):
            raise InvalidProgram(f"{source.name}: weights must come after the other parameters")
        if not source.instructions or not isinstance(source.instructions[-1], (Ret, Goto)):
            raise InvalidProgram(f"{source.name}: the last instruction must return or jump to an instruction")
        self.regions: list[Region] = []
        # steps that a call in parts divides; each has a function that runs the step and yields between two parts
        self.divided: dict[Step, Callable[[Frame], Iterator[None]]] = {}
        # functions to call when weights are bound; regions store the addresses of weights
        self.on_bind: list[Callable[[list[Any]], None]] = []
        self._num_params = len(source.params)
        self._repeatable = result_of(source)
        self._replay: Replay | None = None
        self._replayed: Frame  # the frame whose heap `_replay` reads, so no other call may use it
        self._layouts: list[Any] = []  # element types and shapes of the arguments of the last call that was not a replay
        self._no_inputs = [None] * self._num_inputs
        self._no_values = [None] * max(source.num_registers - self._num_params, 0)
        self._use([None] * len(source.weights), [p.name for p in source.weights])

        loader = Loader(machine, self, builtins)
        varying = [i for i, p in enumerate(source.params) if not p.weight or mentions_slots(p.spec)]
        self._match = loader.match([Item(i, f"parameter {source.params[i].name!r}", source.params[i].spec) for i in varying], source.derive)
        self.written = [i for i, p in enumerate(source.inputs) if p.written]  # indices of the inputs that are changed in place
        self._arena_slot = loader.slot(source.arena_bytes)
        self._steps = [loader.step(i) for i in source.instructions]
        self._jumps = any(isinstance(i, (Goto, If, Ret)) for i in source.instructions[:-1])
        loader.finish()
        self._literals = loader.literals

    def bind(self, arrays: Mapping[str, Tensor]) -> None:
        """Bind all weights at once. The tensors themselves are stored, not copies. Raise ArgumentMismatch if a weight has no value, if a
        value does not match its specification, or if a weight that the function changes in place is read-only. Raise UnknownName if
        `arrays` has a name that no weight has."""
        source = self.source
        names = [p.name for p in source.weights]
        if missing := [n for n in names if n not in arrays]:
            raise ArgumentMismatch(f"{source.name}: no value for weight {', '.join(missing)}")
        if unknown := [n for n in arrays if n not in names]:
            raise UnknownName(f"weight of function {source.name!r}:", unknown[0], names)
        values = [arrays[n] for n in names]
        items = [Item(i, f"weight {p.name!r}", p.spec) for i, p in enumerate(source.weights) if not mentions_slots(p.spec)]
        frame = self._new_frame()
        Match(source.name, source.slots, (), items, None, self._machine.device)(values, frame.heap, frame.heap_handle)
        for param, value in zip(source.weights, values, strict=True):
            if param.written and not self._machine.device.is_writable(value):
                raise ArgumentMismatch(f"{source.name}: weight {param.name!r} is changed in place, but the array is read-only")
        self._use(values, [])

    def _use(self, weights: list[Any], missing: list[str]) -> None:
        """Store the values of the weights. `missing` are the names of weights without a value. If there are none, pass the values to the
        regions."""
        self._weights, self._missing, self._replay = weights, missing, None
        self._frames: list[Frame] = []  # frames whose registers hold these weights
        if not missing:
            for notify in self.on_bind:
                notify(weights)

    def call_with_weights(self, args: Sequence[Any]) -> Any:
        """Call with values for all parameters, including weights, and afterwards bind the previous weights again. Functions of a program
        call each other in this way. Without values for weights, call with the bound weights."""
        if len(args) == self._num_inputs:
            return self.call(args)
        if len(args) != len(self.source.params):
            self._cannot_call(len(args))
        previous = self._weights, self._missing
        self.bind({p.name: arg for p, arg in zip(self.source.weights, args[self._num_inputs :], strict=True)})
        try:
            return self.call(args[: self._num_inputs])
        finally:
            self._use(*previous)

    def call(self, args: Sequence[Any], *, views: bool = False, keep_last: bool = False) -> Any:
        """Call with the bound weights. Results in the arena are copied out of it, unless `views` is true. With `keep_last`, the results of
        the last call without `keep_last` stay intact in the arena. Raise ArgumentMismatch if an argument does not match, or if the weights
        are not bound, and TooDeep if too many calls are nested."""
        machine = self._machine
        if self._replay is not None and not keep_last and machine.profile is None:
            result = self._replay.call(args, views)
            if result is not None:
                return result
        if len(args) != self._num_inputs or self._missing or machine.depth >= MAX_DEPTH:
            self._cannot_call(len(args))
        frame = self._frames.pop() if self._frames else self._new_frame()
        registers = frame.registers
        registers[: self._num_inputs] = args
        self._match(registers, frame.heap, frame.heap_handle)
        if self.written:
            self._check_written(args)
        frame.arena = machine.arena.enter(frame.heap[self._arena_slot], keep_last=keep_last)
        machine.depth += 1
        try:
            result = self._run(frame)
            result = _out_of(machine.device, machine.no_arena if views else frame.arena, result)
        finally:
            machine.depth -= 1
            machine.arena.leave()
        # The frame must not keep tensors alive until the next call. Its weights stay: to remove each of them would cost cache misses.
        registers[: self._num_inputs], registers[self._num_params :] = self._no_inputs, self._no_values
        frame.arena, frame.result = machine.no_arena, None
        if self._repeatable is None or machine.depth or keep_last or not self._prepare_replay(frame, args):
            self._frames.append(frame)
        return result

    def in_parts(self, args: Sequence[Any]) -> InParts[Any]:
        """Call with the bound weights in parts: yield between two parts, and return the result. Between two parts other calls may run, but
        no second call in parts. Raise ArgumentMismatch if an argument does not match, or if the weights are not bound."""
        machine = self._machine
        if len(args) != self._num_inputs or self._missing:
            self._cannot_call(len(args))
        frame = self._new_frame()
        frame.registers[: self._num_inputs] = args
        self._match(frame.registers, frame.heap, frame.heap_handle)
        self._check_written(args)
        with machine.aside.entered(frame.heap[self._arena_slot]) as frame.arena:
            pc = 0
            while pc != _RETURNED:
                step, target = self._steps[pc], None
                if step in self.divided:
                    yield from self.divided[step](frame)
                else:
                    target = step(frame)
                pc = pc + 1 if target is None else target
            return _out_of(machine.device, frame.arena, frame.result)

    def _check_written(self, args: Sequence[Any]) -> None:
        """Raise ArgumentMismatch if an argument that the function changes in place is read-only."""
        for i in self.written:
            if not self._machine.device.is_writable(args[i]):
                name = self.source.params[i].name
                raise ArgumentMismatch(f"{self.source.name}: parameter {name!r} is changed in place, but the array is read-only")

    def _prepare_replay(self, frame: Frame, args: Sequence[Any]) -> bool:
        """Let later calls repeat the call that used the frame, and return True. Return False if the arguments of this call do not have the
        layouts of the previous call's, or if the device cannot repeat the region."""
        layouts = [(arg.dtype, arg.shape) for arg in args]
        if self._repeatable is None or layouts != self._layouts:
            self._layouts = layouts
            return False
        repeat = self.regions[0].repeat(frame.heap_handle, args, self._repeatable.placed(frame.heap)) if self.regions else None
        if repeat is None:
            return False
        if self._replay is not None:
            self._frames.append(self._replayed)
        self._replayed = frame
        self._replay = Replay(self._machine.arena, self._num_inputs, frame.heap[self._arena_slot], repeat)
        return True

    def _run(self, frame: Frame) -> Any:
        """Run the instructions, and return the result of the function."""
        steps = self._steps
        if not self._jumps:
            for step in steps:
                step(frame)
            return frame.result
        pc = 0
        while pc != _RETURNED:
            target = steps[pc](frame)
            pc = pc + 1 if target is None else target
        return frame.result

    def arena_bytes(self, dims: Mapping[str, int]) -> int:
        """Return the bytes of the arena that a call needs if its variables have the values `dims`."""
        return self._sized(dims).heap[self._arena_slot]

    def prepare(self, dims: Mapping[str, int]) -> None:
        """Prepare the regions for calls whose variables have the same orders of magnitude as `dims`."""
        frame = self._sized(dims)
        for region in self.regions:
            region.prepare(frame.heap_handle)

    @property
    def variables(self) -> dict[str, int | None]:
        """The variables, each with its largest value, or None if there is no limit or if the limit depends on other variables."""
        upper = {bound.slot: bound.upper for bound in self.source.bounds}
        found = {slot: upper.get(slot) for slot in sorted(self._match.defined)}
        return {self.source.slots[slot]: most if isinstance(most, int) else None for slot, most in found.items()}

    def _sized(self, dims: Mapping[str, int]) -> Frame:
        """Make a frame whose variables have the values `dims`, and derive its other slots. Raise UnknownName if `dims` has a name that no
        variable has, and ArgumentMismatch if `dims` lacks a variable."""
        frame = self._new_frame()
        names = {self.source.slots[slot]: slot for slot in self._match.defined}
        for name, value in dims.items():
            if name not in names:
                raise UnknownName(f"variable of function {self.source.name!r}:", name, names)
            frame.heap[names[name]] = value
        if missing := sorted(names.keys() - dims.keys()):
            raise ArgumentMismatch(f"{self.source.name}: no value for variable {', '.join(missing)}")
        self._match.derive(frame.heap, frame.heap_handle)
        return frame

    def _new_frame(self) -> Frame:
        registers = [*self._no_inputs, *self._weights, *self._no_values]
        return Frame(self._machine.device, registers, len(self.source.slots), self._literals, self._machine.no_arena)

    def _cannot_call(self, num_args: int) -> NoReturn:
        """Raise the error that says why `call` refuses this number of arguments, or any call at present."""
        name = self.source.name
        if num_args != self._num_inputs:
            names = ", ".join(p.name for p in self.source.inputs)
            raise ArgumentMismatch(f"{name}: expected {self._num_inputs} arguments ({names}), got {num_args}")
        if self._missing:
            raise ArgumentMismatch(f"{name}: bind its weights before calling it: {', '.join(self._missing)}")
        raise TooDeep(f"{name}: more than {MAX_DEPTH} nested calls")


def _out_of(device: Device, arena: Memory, value: Any) -> Any:
    """Return a result whose tensors later calls do not overwrite: `Device.kept` copies the tensors that they would overwrite."""
    if isinstance(value, device.tensor_type):
        return device.kept(value, arena)
    if isinstance(value, tuple):
        return tuple(_out_of(device, arena, v) for v in value)
    return value


class Machine:
    """A loaded executable. Only one thread at a time may use it."""

    def __init__(self, executable: Executable, device: Device, account: MemoryAccount, builtins: Mapping[str, Builtin]) -> None:
        self.executable = executable
        self.device = device
        self.constants = [device.upload(constant) for constant in executable.constants]
        self.arena = Arena(account, device)
        self.aside = Aside(account, device)
        self.no_arena = device.allocate(0)
        self.account = account
        self.depth = 0
        self.profile: Profile | None = None
        code, target = executable.object_code, executable.meta.target
        self._code = device.load(code, target, executable.host) if code else None
        self.functions: dict[str, Function] = {}
        for name, source in executable.meta.functions.items():
            self.functions[name] = Function(self, source, builtins)

    def function(self, name: str) -> Function:
        """Return the function with this name. Raise UnknownName if there is none."""
        function = self.functions.get(name)
        if function is None:
            raise UnknownName("function", name, self.functions)
        return function

    def code_for(self, symbol: str) -> Code:
        """Return the loaded code. Raise InvalidProgram if the executable has no code; the error names `symbol`, to which the program
        refers."""
        if self._code is None:
            raise InvalidProgram(f"the program refers to {symbol!r}, but has no object code")
        return self._code


class Loader:
    """Compiles the instructions of one function into closures. Raises InvalidProgram if an instruction refers to a register, slot, constant
    or instruction that does not exist, and UnknownName if it calls a builtin, routine or function that does not exist."""

    def __init__(self, machine: Machine, function: Function, builtins: Mapping[str, Builtin]) -> None:
        self.machine = machine
        self.function = function
        self.source = function.source
        self.weights = range(len(self.source.inputs), len(self.source.params))  # registers of the weights
        self._literals: dict[int, int] = {}  # value of a literal -> its index in the heap, after the slots
        self._builtins = builtins
        self._bounded: set[int] = set()

    # --- instructions ------------------------------------------------------------------------------------------------

    def step(self, instruction: Instruction) -> Step:
        """Compile an instruction."""
        match instruction:
            case Call(dst, callee, args):
                return self._call(dst, callee, args)
            case Ret(value):
                return _ret(self.read(value))
            case Goto(target):
                target = self._target(target)
                return lambda frame: target
            case If(cond, orelse):
                return _if(self.read(cond), self._target(orelse))
        assert_never(instruction)

    def _target(self, target: int) -> int:
        """Return the index of an instruction. Raise InvalidProgram if the instruction does not exist."""
        if not 0 <= target < len(self.source.instructions):
            raise self.invalid(f"there is no instruction {target} to jump to")
        return target

    def _call(self, dst: int | None, callee: str, args: tuple[Arg, ...]) -> Step:
        """Compile a call of a builtin, of a library routine, or of a function. Raise UnknownName if there is none of this name, and
        InvalidProgram if the result would overwrite a weight."""
        kind, _, name = callee.partition(".")
        if dst is not None and self.register(dst) in self.weights:
            raise self.invalid(f"register {dst} holds a weight and cannot be overwritten")
        if kind == "vm" and name:
            if name not in self._builtins:
                raise UnknownName("builtin", callee, (f"vm.{n}" for n in self._builtins))
            return self._builtins[name](self, args, dst)
        if kind == "lib" and name:
            return self._call_library(dst, name, args)
        if callee not in self.machine.executable.meta.functions:
            raise UnknownName("function", callee, self.machine.executable.meta.functions)
        return _call_function(self.machine.functions, callee, [self.read(a) for a in args], dst)

    def _call_library(self, dst: int | None, name: str, args: tuple[Arg, ...]) -> Step:
        """Compile a call of a library routine. Raise UnknownName if there is none of this name, and InvalidProgram if the number of
        arguments is wrong."""
        known = routine(name)
        if len(args) != known.num_args:
            raise self.invalid(f"{known.signature} is called with {len(args)} arguments")
        reads = [self.read(a) for a in args]
        num_given = len(known.inputs) + len(known.attributes)
        outputs = None if known.fresh else reads[num_given:]
        return _call_library(self.machine.device, known.compute, known.signature, reads[:num_given], outputs, dst)

    # --- operands ----------------------------------------------------------------------------------------------------

    def read(self, arg: Arg) -> Read:
        """Return a function that reads the operand from a frame."""
        match arg:
            case Reg(index):
                index = self.register(index)
                return lambda frame: frame.registers[index]
            case Slot() as slot:
                index = self.slot(slot)
                return lambda frame: frame.heap[index]
            case ConstantRef(index):
                array = self.constant(index)
                return lambda frame: array
            case Imm(value):
                return lambda frame: value
        assert_never(arg)

    def literal(self, arg: Arg, type_: type | tuple[type, ...]) -> Any:
        """Return the value of an operand that must be known when the program is loaded. Raise InvalidProgram if it is no literal of type
        `type_`."""
        if not isinstance(arg, Imm) or not isinstance(arg.value, type_):
            raise self.invalid(f"expected a literal of {type_}, got {arg}")
        return arg.value

    def register(self, index: int) -> int:
        """Return the number of a register. Raise InvalidProgram if the register does not exist."""
        if not 0 <= index < self.source.num_registers:
            raise self.invalid(f"register {index} does not exist, there are {self.source.num_registers} registers")
        return index

    def constant(self, index: int) -> Tensor:
        """Return the constant with this number. Raise InvalidProgram if it does not exist."""
        if not 0 <= index < len(self.machine.constants):
            raise self.invalid(f"constant {index} does not exist, there are {len(self.machine.constants)} constants")
        return self.machine.constants[index]

    def slot(self, ref: DimRef) -> int:
        """Return the index of an integer in the heap, where literals come after the slots. Raise InvalidProgram if a slot does not exist,
        or if a literal does not fit 64 bits."""
        if isinstance(ref, Slot):
            if not 0 <= ref.index < len(self.source.slots):
                raise self.invalid(f"slot {ref.index} does not exist, there are {len(self.source.slots)} slots")
            return ref.index
        if ref not in INT64:
            raise self.invalid(f"literal {ref} does not fit 64 bits")
        return len(self.source.slots) + self._literals.setdefault(ref, len(self._literals))

    @property
    def literals(self) -> tuple[int, ...]:
        """The literals in the order in which they lie in the heap."""
        return tuple(self._literals)

    # --- matching of arguments ---------------------------------------------------------------------------------------

    def match(self, items: Sequence[Item], symbol: str | None, place: str = "") -> Match:
        """Compile a match of these items. `symbol` names its shape function; `place` says in messages where the match is."""
        derive = self.derive(symbol) if symbol else None
        match = Match(self.source.name, self.source.slots, self.source.bounds, items, derive, self.machine.device, place)
        self._bounded |= match.defined
        return match

    def derive(self, symbol: str) -> Derive:
        return self.machine.code_for(symbol).derive(symbol)

    def finish(self) -> None:
        """Raise InvalidProgram if a bound belongs to a slot that no match defines. Call this after all instructions."""
        for bound in self.source.bounds:
            if bound.slot not in self._bounded:
                raise self.invalid(f"the bound of {bound.name} is never checked: nothing defines slot {bound.slot}")

    def invalid(self, problem: str) -> InvalidProgram:
        """Make the error for a program that our compiler would not emit."""
        return InvalidProgram(f"{self.source.name}: {problem}")


def _ret(read: Read) -> Step:
    def step(frame: Frame) -> int:
        frame.result = read(frame)
        return _RETURNED

    return step


def _if(cond: Read, orelse: int) -> Step:
    return lambda frame: None if cond(frame) else orelse


def _call_function(functions: Mapping[str, Function], callee: str, args: Sequence[Read], dst: int | None) -> Step:
    def step(frame: Frame) -> None:
        result = functions[callee].call_with_weights([read(frame) for read in args])
        if dst is not None:
            frame.registers[dst] = result

    return step


def _call_library(
    device: Device,
    compute: Callable[..., tuple[Any, ...]],
    signature: str,
    given: Sequence[Read],
    outputs: Sequence[Read] | None,
    dst: int | None,
) -> Step:
    """Return a step that calls a library routine. `outputs` reads the arrays to fill; None: the routine returns new arrays."""

    def step(frame: Frame) -> None:
        results = compute(*(on_host(device, read(frame)) for read in given))
        if outputs is None:
            results = tuple(map(device.upload, results))
            if dst is not None:
                frame.registers[dst] = results[0] if len(results) == 1 else results
            return
        for read, result in zip(outputs, results, strict=True):
            target = read(frame)
            if target.shape != result.shape:
                raise ArgumentMismatch(f"{signature}: the output has shape {target.shape}, but the result has shape {result.shape}")
            device.copy(target, result)

    return step


def on_host(device: Device, value: Any) -> Any:
    """Return a tensor of the device as an array of the host, and any other value unchanged."""
    return device.download(value) if isinstance(value, device.tensor_type) else value
