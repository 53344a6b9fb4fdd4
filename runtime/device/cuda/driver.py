"""Calls of the CUDA driver that pycuda lacks, such as loading modules with the assembler's messages, launching kernels by handle, and
graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import lru_cache
from typing import Any

from runtime.errors import DamagedCode, DeviceFault, IncompatibleExecutable, RuntimeFault, UnresolvedSymbol

LIBRARY = "libcuda.so.1"
LOG_BYTES = 8192
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # driver options: the buffer for error messages, and its size
_PTX = 1  # type of the input of a link
_MOST_SHARED_BYTES = 8  # attribute of a function: most bytes of shared memory that a launch may request
_CARVE_OUT = 9  # attribute of a function: the preferred share of a multiprocessor's L1 cache that is shared memory, in percent
_PEER_ACCESS_ALREADY_ENABLED = 704
_OF_THIS_THREAD = 1  # capture mode in which calls of other threads do not end the capture

_Handle = c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuModuleLoadDataEx": (c_void_p, c_void_p, c_uint, c_void_p, c_void_p),
    "cuLinkCreate_v2": (c_uint, c_void_p, c_void_p, c_void_p),
    "cuLinkAddData_v2": (_Handle, c_int, c_void_p, c_size_t, c_char_p, c_uint, c_void_p, c_void_p),
    "cuLinkComplete": (_Handle, c_void_p, c_void_p),
    "cuLinkDestroy": (_Handle,),
    "cuModuleGetFunction": (c_void_p, _Handle, c_char_p),
    "cuModuleUnload": (_Handle,),
    "cuFuncSetAttribute": (_Handle, c_int, c_int),
    "cuLaunchKernelEx": (c_void_p, _Handle, c_void_p, c_void_p),
    "cuStreamBeginCapture_v2": (_Handle, c_int),
    "cuStreamEndCapture": (_Handle, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, _Handle, c_ulonglong),
    "cuGraphLaunch": (_Handle, _Handle),
    "cuGraphDestroy": (_Handle,),
    "cuGraphExecDestroy": (_Handle,),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxEnablePeerAccess": (_Handle, c_uint),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
}

# The error that a status of the driver raises; any other status raises DeviceFault.
_ERRORS: dict[int, type[RuntimeFault]] = {
    200: DamagedCode,  # INVALID_IMAGE
    209: IncompatibleExecutable,  # NO_BINARY_FOR_GPU
    218: DamagedCode,  # INVALID_PTX
    222: IncompatibleExecutable,  # UNSUPPORTED_PTX_VERSION
    500: UnresolvedSymbol,  # NOT_FOUND
}


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


def call(name: str, *args: Any, about: str = "") -> None:
    """Call a function of the driver. Raise an error if its status is not success; `about` describes the operation in the message."""
    status = getattr(_library(), name)(*args)
    if status:
        raise _error(status, about or name)


def message(status: int) -> str:
    """Return the driver's name for a status and its description."""
    texts: list[str] = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = c_char_p()
        getattr(_library(), name)(status, byref(text))
        texts.append((text.value or b"").decode())
    return ": ".join(text for text in texts if text) or f"CUDA error {status}"


def _error(status: int, about: str) -> RuntimeFault:
    """Make the error for a status of the driver. `about` describes the operation."""
    return _ERRORS.get(status, DeviceFault)(f"{about}: {message(status)}")


# --- contexts ----------------------------------------------------------------------------------------------------------


def current_context() -> int:
    """Return the context that is current for this thread, or 0 if there is none."""
    found = c_void_p()
    call("cuCtxGetCurrent", byref(found))
    return found.value or 0


def enable_peer_access(context: int) -> None:
    """Let kernels of the current context read the memory of another context."""
    status = _library().cuCtxEnablePeerAccess(context, 0)
    if status not in (0, _PEER_ACCESS_ALREADY_ENABLED):
        raise _error(status, "access to the memory of another GPU")


# --- code --------------------------------------------------------------------------------------------------------------


def load_module(image: bytes) -> int:
    """Load PTX, which the driver assembles for its card, or code that `assemble` returned. Return the module."""
    module = c_void_p()
    with _log() as (options, values):
        call("cuModuleLoadDataEx", byref(module), c_char_p(image), 2, options, values, about="the code of the executable")
    return module.value or 0


def assemble(ptx: bytes) -> bytes:
    """Assemble PTX for the card of the current context. Return code that the driver can load without assembling it again."""
    state, code, size = c_void_p(), c_void_p(), c_size_t()
    text = ptx + b"\0"
    with _log() as (options, values):
        call("cuLinkCreate_v2", 2, options, values, byref(state))
        try:
            call("cuLinkAddData_v2", state, _PTX, c_char_p(text), len(text), b"kernels", 0, None, None, about="the PTX of the executable")
            call("cuLinkComplete", state, byref(code), byref(size), about="the PTX of the executable")
            return ctypes.string_at(code.value or 0, size.value)
        finally:
            call("cuLinkDestroy", state)


@contextmanager
def _log() -> Generator[tuple[Any, Any]]:
    """Yield options that collect the assembler's messages. A RuntimeFault that is raised inside the `with` gets these messages appended."""
    log = ctypes.create_string_buffer(LOG_BYTES)
    try:
        yield (c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES), (c_void_p * 2)(ctypes.addressof(log), LOG_BYTES)
    except RuntimeFault as error:
        words = log.value.decode(errors="replace").strip()
        raise type(error)(f"{error}{f' ({words})' if words else ''}") from None


def function_of(module: int, name: str) -> int:
    """Return a kernel. All kernels prefer as much shared memory as there is. A multiprocessor that changes the size of its shared memory
    must first end all its blocks, so kernels that prefer different sizes could not overlap."""
    found = c_void_p()
    call("cuModuleGetFunction", byref(found), module, name.encode(), about=f"kernel {name}")
    call("cuFuncSetAttribute", found, _CARVE_OUT, 100, about=f"kernel {name}")
    return found.value or 0


def allow_shared_bytes(function: int, num_bytes: int, name: str) -> None:
    """Let launches of a kernel request this much shared memory, more than a launch may request without this call."""
    call("cuFuncSetAttribute", function, _MOST_SHARED_BYTES, num_bytes, about=f"kernel {name} with {num_bytes} bytes of shared memory")


def unload_module(module: int) -> None:
    """Unload code that `load_module` loaded. None of its kernels may be running."""
    call("cuModuleUnload", module)


# --- launches ----------------------------------------------------------------------------------------------------------


class Parameters:
    """The parameters of a kernel: the address of its record, and whether it names itself when it begins (`last_launch.py`). The driver
    copies them when the kernel is launched."""

    def __init__(self, address: int, *, tells: bool = False) -> None:
        self.address, self._words = address, (c_ulonglong(address), c_uint(tells))
        self.array = (c_void_p * 2)(*map(ctypes.addressof, self._words))


class _Attribute(ctypes.Structure):
    """The driver's structure CUlaunchAttribute. Its value is a union of 64 bytes, which begins with the integer of the only attribute
    that is used."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


class _Config(ctypes.Structure):
    """The driver's structure CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z", "shared_bytes")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


_OVERLAPS = _Attribute(6, 0, 1)  # PROGRAMMATIC_STREAM_SERIALIZATION


def launch(
    function: int,
    blocks: int,
    threads: int,
    shared_bytes: int,
    parameters: Parameters,
    stream: int,
    about: str,
    *,
    overlaps: bool = False,
) -> None:
    """Launch a kernel in `blocks` blocks, each of `threads` threads. `about` describes the launch in messages. With `overlaps`, the kernel
    may begin before the previous kernel of the stream has ended."""
    attributes = ctypes.addressof(_OVERLAPS) if overlaps else None
    config = _Config(blocks, 1, 1, threads, 1, 1, shared_bytes, stream, attributes, int(overlaps))
    call("cuLaunchKernelEx", byref(config), function, parameters.array, None, about=about)


# --- graphs ------------------------------------------------------------------------------------------------------------


class Graph:
    """A captured list of launches. One call runs the whole list."""

    def __init__(self, executable: int) -> None:
        self._executable = executable

    def launch(self, stream: int, about: str) -> None:
        """Launch the graph on a stream. `about` describes it in messages."""
        call("cuGraphLaunch", self._executable, stream, about=about)

    def close(self) -> None:
        call("cuGraphExecDestroy", self._executable)


@contextmanager
def captured(stream: int) -> Generator[list[Graph]]:
    """Capture the launches on the stream as a graph instead of running them. The graph is appended to the yielded list at the end."""
    found: list[Graph] = []
    call("cuStreamBeginCapture_v2", stream, _OF_THIS_THREAD)
    graph = c_void_p()
    try:
        yield found
    except BaseException:  # raise this error, not the error of ending an incomplete capture
        _library().cuStreamEndCapture(stream, byref(graph))
        if graph:
            _library().cuGraphDestroy(graph)
        raise
    call("cuStreamEndCapture", stream, byref(graph))
    executable = c_void_p()
    try:
        call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
    finally:
        _library().cuGraphDestroy(graph)
    found.append(Graph(executable.value or 0))
