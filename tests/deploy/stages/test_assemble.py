"""A worker refuses stages that would not do their part, and says which one and why."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from importlib.metadata import version

import pytest

from deploy import demo
from deploy.model_loading.known import begin
from deploy.stages import assemble as assembling
from deploy.stages.assemble import assemble
from deploy.stages.starting import Peer
from server.interfaces import LoadError
from server.messages import ErrorCode, Load, LoadFailed, Progress
from server.stages.link import Link, StageLost
from server.stages.messages import Greeting, Planned, Reserve

Stage = Callable[[Link], None]
OURS = Greeting(version("relaxserve"), 1 << 34)


def of_another_version(link: Link) -> None:
    link.send(Greeting("0.0.1", 1 << 34))


def that_cannot_load(link: Link) -> None:
    link.send(OURS)
    load, _ = link.receive()
    assert isinstance(load, Load) and load.layers is not None and load.layers[0] == 0 and load.stages == ()
    link.send(Progress("compile", 0.5))
    link.send(LoadFailed(ErrorCode.INSUFFICIENT_MEMORY, "the layers take 9 GiB; 1 GiB are free", 9, 1))


def with_other_files(link: Link) -> None:
    link.send(OURS)
    link.receive()
    link.send(Planned("fp_other", 1024, (100,)))


def that_ends(link: Link) -> None:
    link.send(OURS)
    link.receive()


def that_hangs(link: Link) -> None:
    link.send(OURS)
    link.receive()
    link.receive()


def that_talks_nonsense(link: Link) -> None:
    link.send(OURS)
    link.receive()
    link.send(Reserve((1,)))


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        (of_another_version, r"stage 1 \(a\) runs relaxserve 0.0.1, and this server .*; install the same version"),
        (that_cannot_load, r"stage 1 \(a\) cannot load its layers with its part of the memory: the layers take 9 GiB; 1 GiB are free"),
        (with_other_files, r"stage 1 \(a\) would compute fp_other with 1024 tokens of context, and this server fp_.*copy the same files"),
        (that_ends, r"the connection to stage 1 \(a\) has ended, while it was loading"),
        (that_hangs, r"the connection to stage 1 \(a\) has failed: timed out, while it was loading"),
        (that_talks_nonsense, r"stage 1 \(a\) sent Reserve, expected Planned"),
    ],
)
def test_a_stage_that_does_not_do_its_part_is_refused(stage: Stage, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()

    def act() -> None:
        link = Link(far, "the worker")
        try:
            stage(link)
            if stage is not that_ends:
                link.receive()  # the worker ends the connection
        except StageLost:
            pass
        finally:
            link.close()

    monkeypatch.setattr(assembling, "start_stage", lambda place, secret, number: Peer(place, Link(near, f"stage {number} (a)")))
    monkeypatch.setattr(assembling, "SILENCE_S", 0.5 if stage is that_hangs else 60.0)
    actor = threading.Thread(target=act)
    actor.start()
    load = Load("demo", str(demo.MODEL), "bf16", stages=("a", "local"), stage_secret="a secret")
    with pytest.raises(LoadError, match=why) as refused:
        assemble(begin(load))
    actor.join()
    if stage is that_cannot_load:
        assert not refused.value.required_bytes, "models of this server make no room on another machine"
