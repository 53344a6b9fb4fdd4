"""Assemble PTX and disassemble it again by NVIDIA's tools, which need no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.lab.sass.listing import Listing, read_listings

PACKAGED = Path(sysconfig.get_path("purelib")) / "nvidia"  # where NVIDIA's packages install their tools
SERIALISED = re.compile(r"warning|serializ|C75\d\d", re.IGNORECASE)  # what the assembler says of `wgmma` that it runs one by one
_USAGE = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


class ToolMissing(Exception):
    """A tool of NVIDIA is not installed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that the assembler gave to a kernel."""

    registers: int
    shared_bytes: int  # those that the kernel declares; a launch may request more
    spilled_bytes: int  # read from the stack or written to it, because registers did not suffice
    stack_bytes: int  # of a thread, in local memory: for what is spilled, and for arrays whose indices are not constants


@dataclass(frozen=True)
class Assembled:
    usage: Mapping[str, Usage]
    said: str  # the messages of the assembler
    cubin: bytes

    @cached_property
    def listings(self) -> Mapping[str, Listing]:
        """Disassembling takes as long as assembling, and some tests need only what the assembler says."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return read_listings(_output([found("nvdisasm"), "-hex", "-ndf", file.name]))  # -ndf: not where indirect branches go


def found(tool: str) -> str:
    """Return the path of a tool."""
    path = shutil.which(tool) or next((str(p) for p in PACKAGED.glob(f"*/bin/{tool}")), None)
    if path is None:
        package = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}[tool]
        raise ToolMissing(f"{tool} is not installed: pip install {package}")
    return path


def assemble(ptx: bytes, target: str) -> Assembled:
    ptxas, _ = found("ptxas"), found("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_bytes(ptx)
        said = _output([ptxas, "-v", f"-arch={target}", str(source), "-o", str(cubin)], errors=True)
        return Assembled(read_usage(said), said, cubin.read_bytes())


def read_usage(said: str) -> dict[str, Usage]:
    """Read the resources of each kernel from the messages of `ptxas -v`."""
    usage: dict[str, Usage] = {}
    for match in _USAGE.finditer(said):
        shared = _SHARED.search(match["rest"])
        spilled = int(match["stores"]) + int(match["loads"])
        usage[match["name"]] = Usage(int(match["registers"]), int(shared[1]) if shared else 0, spilled, int(match["stack"]))
    return usage


def _output(command: list[str], *, errors: bool = False) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {result.stderr.strip()}")
    return result.stderr if errors else result.stdout
