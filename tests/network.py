"""A second machine on this one: a network namespace of its own, and the cable between it and this one, which tests cut.

Frames are lost as they are when a switch fails: both ends keep their links, their routes and their connections, and nothing tells them.
Each end finds the other by a fixed neighbour entry. An entry with an address that no interface has makes the other end drop the frames.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from shutil import which

NOBODY = "02:00:00:00:00:99"  # address of no interface
MARKS = {"near": "02:00:00:00:01:01", "far": "02:00:00:00:01:02"}


@cache
def can_cut() -> bool:
    """Return whether this process may make network namespaces with cables, by making one. Root may not in many containers."""
    if not all(which(program) for program in ("ip", "unshare", "nsenter")):
        return False
    words = ("unshare", "--net", "--", "ip", "link", "add", "x", "type", "veth", "peer", "name", "y")
    return subprocess.run(words, capture_output=True).returncode == 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The far end of a cable."""

    near: str  # address of this machine
    far: str  # address of the other one
    inside: tuple[str, ...]  # words before a command that run it on the other machine
    device: str

    def cut(self, *, to_far: bool = True, to_near: bool = True) -> None:
        """Lose what is sent from now on, in both directions or in one."""
        if to_far:
            self._point_near_at(NOBODY)
        if to_near:
            self._point_far_at(NOBODY)

    def mend(self) -> None:
        self._point_near_at(MARKS["far"])
        self._point_far_at(MARKS["near"])

    def _point_near_at(self, address: str) -> None:
        _ip("neigh", "replace", self.far, "lladdr", address, "dev", self.device, "nud", "permanent")

    def _point_far_at(self, address: str) -> None:
        _ip("neigh", "replace", self.near, "lladdr", address, "dev", "cable", "nud", "permanent", inside=self.inside)


@contextmanager
def other_machine() -> Generator[Machine]:
    """Yield a machine: a network namespace at the other end of a virtual cable. On exit, remove the cable."""
    number = secrets.randbelow(1 << 14)
    net = f"10.{192 + (number >> 8)}.{number & 255}"
    device = f"rs{number}"
    holder = subprocess.Popen(["unshare", "--net", "--", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        holder.stdout.readline()  # the namespace is there
        machine = Machine(f"{net}.1", f"{net}.2", ("nsenter", "--target", str(holder.pid), "--net", "--"), device)
        far = ("peer", "name", "cable", "address", MARKS["far"], "netns", str(holder.pid))
        _ip("link", "add", device, "address", MARKS["near"], "type", "veth", *far)
        _ip("addr", "add", f"{machine.near}/24", "dev", device)
        _ip("addr", "add", f"{machine.far}/24", "dev", "cable", inside=machine.inside)
        _ip("link", "set", device, "up")
        for name in ("lo", "cable"):
            _ip("link", "set", name, "up", inside=machine.inside)
        machine.mend()
        yield machine
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        subprocess.run(["ip", "link", "delete", device], capture_output=True)  # a process that is left would keep it


def _ip(*words: str, inside: Sequence[str] = ()) -> None:
    subprocess.run([*inside, "ip", *words], check=True, capture_output=True)
