"""Driver functions that link PTX into code for one card. The "code" here is the PTX itself after a line that names the card."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from tests.gpu.driver.calls import Result, function, put
from tests.gpu.driver.card import current, machine

MAGIC = b"\x7fELF software GPU "
PTX = 1  # CUjitInputType of PTX text


@dataclass(slots=True, eq=False)
class Link:
    text: bytes = b""
    # kept alive because C reads this memory until the link is destroyed
    code: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)


@function("cuLinkCreate_v2", "uppp")
def create(count: int, options: int | None, values: int | None, out: int) -> None:
    current()
    put(out, ctypes.c_void_p, machine.handle(Link()))


@function("cuLinkAddData_v2", "pipzpupp")
def add_data(handle: int, kind: int, data: int, size: int, name: int | None, count: int, options: int | None, values: int | None) -> Result:
    link, text = machine.find(handle, Link), ctypes.string_at(data, size)
    if kind != PTX or link.text or not text.endswith(b"\0"):
        return Result.INVALID_VALUE
    link.text = text.rstrip(b"\0")
    return Result.SUCCESS if b".target" in link.text else Result.INVALID_PTX


@function("cuLinkComplete", "ppp")
def complete(handle: int, out: int, size: int) -> None:
    link = machine.find(handle, Link)
    machine.assembled += 1
    link.code.append(ctypes.create_string_buffer(MAGIC + b"%d.%d\n" % machine.arch + link.text))
    put(out, ctypes.c_void_p, ctypes.addressof(link.code[0]))
    put(size, ctypes.c_size_t, len(link.code[0]))


@function("cuLinkDestroy", "p")
def destroy(handle: int) -> None:
    machine.find(handle, Link)
    del machine.objects[handle]
