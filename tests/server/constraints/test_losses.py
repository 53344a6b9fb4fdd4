"""If a constraint process is killed or stopped, a new process replaces it and the tokens are the same. No constraint process outlives its
worker."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

import pytest

from server.constraints.compiler import ConstraintCompiler
from server.constraints.grammar import Grammar
from server.constraints.matcher import ConstraintLost
from server.constraints.process.fork_server import ForkServer
from server.constraints.process.process_socket import ProcessSocket
from server.constraints.process.zygote import Zygote
from server.constraints.retries import MAX_LOSSES
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.messages import Abort, Constraint, ConstraintKind, SamplingParams, Submit, Trigger
from server.process_state import fields_of
from tests.process_states import is_running, state_of
from tests.server.constraints.processes import (
    allowed_by,
    answered,
    below,
    mask_of,
    matcher_of,
    processes_of,
    wait_until,
    zygote_of,
)
from tests.server.engine.conftest import EOS, VOCAB

TRIGGER = 310
ENGINES = pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
LIST = Constraint(ConstraintKind.REGEX, "([a-f]{1,4}, ?){50}!")
OTHER = Constraint(ConstraintKind.GRAMMAR, 'start: item ("," item)*\nitem: /[a-z]{3}/ | "(" start ")"')
OFFER = Constraint(ConstraintKind.GRAMMAR, OTHER.source, Trigger(TRIGGER))


def submit_of(name: str, constraint: Constraint | None, **params) -> Submit:
    bias = ((TRIGGER, 8.0),) if constraint is OFFER else ()
    asked = SamplingParams(max_tokens=40, constraint=constraint, banned_token_ids=(EOS,), logit_bias=bias, **params)
    return Submit(name, (5, 6, 7), asked)


SUBMITS = [submit_of("list", LIST), submit_of("other", OTHER), submit_of("offer", OFFER, seed=4), submit_of("plain", None)]


@pytest.fixture
def quick_looks(monkeypatch) -> None:
    monkeypatch.setattr("server.constraints.process.process_socket.LOOK_S", 0.02)


def levels_of(compiler: ConstraintCompiler) -> dict[str, list[int]]:
    zygote = zygote_of(compiler)
    parents = {pid: parent_of(pid) for pid in below(zygote)}
    grammars = [pid for pid, parent in parents.items() if parent == zygote]
    return {"zygote": [zygote], "grammar": grammars, "sequence": [pid for pid in parents if pid not in grammars]}


def parent_of(pid: int) -> int:
    try:
        return int(fields_of(pid)[1])
    except OSError:
        return 0


def hit(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def step_until(rig, condition: Callable[[], bool]) -> None:
    def reached() -> bool:
        rig.step()
        return condition()

    wait_until(reached)


# --- lost processes are replaced -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["sequence", "grammar", "zygote"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_is_replaced_and_the_tokens_are_the_same(rig, compiler, quick_looks, level, number) -> None:
    constraints = compiler()
    expected = rig(constraints=constraints).run(SUBMITS)
    one = rig(OverlappedEngine, constraints=constraints)
    for submit in SUBMITS:
        one.engine.submit(submit)
    for num_tokens in (2, 9):
        step_until(one, lambda n=num_tokens: len(one.outcomes) == 4 and min(len(o.token_ids) for o in one.outcomes.values()) >= n)
        hit(levels_of(constraints)[level], number)
    again = [Submit(f"{submit.request_id} again", submit.prompt_ids, submit.params) for submit in SUBMITS]
    outcomes = one.run(again)
    assert not one.failed
    for submit in SUBMITS:
        expected_one = expected[submit.request_id, 0]
        for name in (submit.request_id, f"{submit.request_id} again"):
            assert outcomes[name, 0].token_ids == expected_one.token_ids and outcomes[name, 0].end == expected_one.end


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_as_it_compiles_is_replaced(compiler, quick_looks, number) -> None:
    one = compiler()
    zygote_of(one)
    matcher = one.open(LIST)
    matcher.poll()
    wait_until(lambda: processes_of(one))
    hit(processes_of(one), number)
    assert mask_of(answered(matcher)) is not None


def test_what_is_only_offered_is_held_to_after_a_loss(rig, compiler, tokenizer) -> None:
    """A lazy constraint still applies after its process was killed, although the request could also finish without it."""
    constraints = compiler()
    one = rig(constraints=constraints)
    one.engine.submit(SUBMITS[2])
    step_until(one, lambda: bool(one.outcomes) and TRIGGER in one.outcomes["offer", 0].token_ids)
    matcher = next(one.engine._requests.sequences).matcher._grammar  # the isolated matcher; the outer matcher applies the rules
    hit(processes_of(constraints), signal.SIGKILL)
    before = matcher._begun
    assert before is not None
    wait_until(lambda: before._grammar._socket.has_ended)
    one.engine.step()
    assert matcher._begun is before


@ENGINES
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, "generation_failed"), (signal.SIGSEGV, "invalid_schema")])
def test_who_is_lost_again_and_again_fails_alone(rig, compiler, monkeypatch, engine, number, code) -> None:
    """If the constraint process of a request is lost repeatedly, only this request fails. The error is a server error if the process was
    killed, and a client error if it crashed."""
    monkeypatch.setattr("server.constraints.retries.FIRST_PAUSE_S", 0.001)
    constraints = compiler()
    one = rig(engine, constraints=constraints)
    one.run([submit_of("first", LIST)])
    open_child = Grammar.open_child

    def open_doomed(grammar: Grammar) -> ProcessSocket | None:
        line = open_child(grammar)
        if line is not None:
            wait_until(lambda: line.receive(0.0) or line.pid is not None)
            hit([line.pid], number)
        return line

    with monkeypatch.context() as patch:
        patch.setattr(Grammar, "open_child", open_doomed)
        one.run([submit_of("lost", LIST), submit_of("plain", None)])
    assert one.failed["lost"].code == code and number.name in one.failed["lost"].message
    assert len(one.outcomes["plain", 0].token_ids) == 40
    assert one.run([submit_of("next", LIST)])["next", 0].token_ids == one.outcomes["first", 0].token_ids


def test_a_zygote_that_cannot_be_started_fails_the_request(rig, compiler, monkeypatch) -> None:
    monkeypatch.setattr("server.constraints.retries.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("server.constraints.process.zygote.COMMAND", ("/nonexistent",))
    one = rig(constraints=compiler())
    one.run([submit_of("a", LIST), submit_of("plain", None)])
    assert one.failed["a"].code == "generation_failed"
    monkeypatch.undo()
    assert one.run([submit_of("b", LIST)])["b", 0].end is not None, "the zygote must start once its command works"


def test_a_grammar_that_was_lost_while_nobody_used_it_is_compiled_again(compiler) -> None:
    one = compiler()
    matcher_of(one, LIST)
    (own,) = processes_of(one)
    os.kill(own, signal.SIGKILL)
    assert mask_of(matcher_of(one, LIST)) is not None


def test_a_budget_is_no_matter_of_other_processes(compiler, monkeypatch) -> None:
    """The time limit of a constraint applies to CPU time, not to wall-clock time: a request must not fail because its process waits for a
    busy CPU."""
    monkeypatch.setattr("server.constraints.process.process_socket.LOOK_S", 1000.0)
    one = compiler()
    matcher = matcher_of(one, LIST)
    token_id = allowed_by(mask_of(matcher))[0]
    (own,) = levels_of(one)["sequence"]
    os.kill(own, signal.SIGSTOP)
    matcher.advance([token_id])
    assert matcher.is_late
    time.sleep(1.2)
    os.kill(own, signal.SIGCONT)
    assert mask_of(answered(matcher)) is not None
    assert levels_of(one)["sequence"] == [own]


# --- the end of processes ------------------------------------------------------------------------------------------------


def heavy() -> Constraint:
    """Return a grammar whose mask after the first letter takes many seconds to compute if the vocabulary has tokens of many spaces."""
    names = [f"e{i}" for i in range(30)]
    rules = [f'{name}: {" | ".join(f"{name} {other}" for other in names)} | " "' for name in names]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(['start: "x" e0', *rules]))


HEAVY = heavy()


def no_descriptor(*_args: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_worker_without_free_descriptors_fails_constraints_alone(rig, compiler, monkeypatch, is_warm: bool) -> None:
    constraints = compiler()
    if is_warm:
        matcher_of(constraints, OTHER)
    one = rig(constraints=constraints)
    with monkeypatch.context() as refusing:
        refusing.setattr("server.constraints.retries.FIRST_PAUSE_S", 0.001)
        refusing.setattr(socket, "socketpair", no_descriptor)
        constraints.warm()
        outcomes = one.run([submit_of("other", OTHER), submit_of("plain", None)])
    assert len(outcomes["plain", 0].token_ids) == 40
    assert one.failed["other"].code == "generation_failed" and "Too many open files; try again" in one.failed["other"].message
    assert len(one.run([submit_of("again", OTHER)])["again", 0].token_ids) == 40


@pytest.fixture
def lack(monkeypatch) -> list[None]:
    """Let opening a socket fail as often as the returned list has elements. Each failure removes one."""
    left, socketpair = list[None](), socket.socketpair

    def opened(*args) -> tuple[socket.socket, socket.socket]:
        if left:
            left.pop()
            no_descriptor()
        return socketpair(*args)

    monkeypatch.setattr(socket, "socketpair", opened)
    return left


@pytest.mark.parametrize("level", ["sequence", "grammar", "zygote"])
@pytest.mark.parametrize("constraint", [OTHER, OFFER], ids=["demanded", "offered"])
def test_a_passing_lack_of_descriptors_changes_no_token(rig, compiler, lack, constraint, level) -> None:
    """A constraint's process is lost, and for a while no socket to another one can be opened. An offered call stays constrained."""
    constraints = compiler()
    submit = submit_of("a", constraint, seed=4)
    expected = rig(constraints=constraints).run([submit])["a", 0].token_ids
    one = rig(constraints=constraints)
    one.engine.submit(submit)
    first = TRIGGER if constraint is OFFER else expected[0]
    step_until(one, lambda: bool(one.outcomes) and first in one.outcomes["a", 0].token_ids)
    hit(levels_of(constraints)[level], signal.SIGKILL)
    lack += [None] * 3
    outcomes = one.run()
    assert not one.failed and not lack
    assert outcomes["a", 0].token_ids == expected


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_new_constraint_waits_for_descriptors(rig, compiler, lack, is_warm: bool) -> None:
    constraints = compiler()
    if is_warm:
        matcher_of(constraints, OTHER)
    one = rig(constraints=constraints)
    lack += [None] * 3
    assert len(one.run([submit_of("other", OTHER)])["other", 0].token_ids) == 40 and not lack


def test_a_process_without_free_descriptors_forks_others_later(monkeypatch) -> None:
    """A descriptor that a process has no room for is left out of the message, and closed: the child of this message is lost."""
    near, far = socket.socketpair()
    server, forked = ForkServer(far, lambda sock: None), []
    monkeypatch.setattr(os, "fork", lambda: forked.append(1) or os.getppid())
    with near, far:
        near.send(b"\0")
        assert server._receive() and not forked
        socket.send_fds(near, [b"\0"], [near.fileno()])
        assert server._receive() and forked
        near.shutdown(socket.SHUT_RDWR)
        assert not server._receive()
    for sock in server._children.values():
        sock.close()


def busy_with(compiler: ConstraintCompiler, constraint: Constraint):
    matcher = matcher_of(compiler, constraint)
    matcher.advance(allowed_by(mask_of(matcher))[:1])
    matcher.prefetch_mask()
    return matcher


@pytest.mark.parametrize("constraint", [LIST, HEAVY], ids=["idle", "busy"])
def test_a_sequence_that_is_let_go_leaves_no_process(compiler, constraint) -> None:
    one = compiler()
    matcher = busy_with(one, constraint)
    (own,) = levels_of(one)["sequence"]
    del matcher
    wait_until(lambda: not is_running(own))


@ENGINES
def test_an_aborted_request_leaves_no_process(rig, compiler, engine) -> None:
    constraints = compiler()
    one = rig(engine, constraints=constraints)
    one.engine.submit(submit_of("a", HEAVY))
    one.engine.submit(submit_of("b", OTHER))
    step_until(one, lambda: bool(one.engine._requests._parked) and bool(levels_of(constraints)["sequence"]))
    for name in "ab":
        one.engine.abort(Abort(name))
    wait_until(lambda: not levels_of(constraints)["sequence"])
    one.run()


def test_an_evicted_grammar_ends_when_its_sequences_have(compiler) -> None:
    one = compiler(num_cached=1)
    matcher = matcher_of(one, LIST)
    mask_of(matcher)
    (grammar,) = levels_of(one)["grammar"]
    matcher_of(one, OTHER)
    assert mask_of(matcher) is not None and is_running(grammar)
    del matcher
    wait_until(lambda: not is_running(grammar))


@pytest.mark.parametrize("hangs_up", [signal.SIG_DFL, signal.SIG_IGN], ids=["in a terminal", "under nohup"])
def test_closing_ends_all_at_once(compiler, hangs_up: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, hangs_up)
    try:
        one = compiler()
        zygote_of(one)
    finally:
        signal.signal(signal.SIGHUP, before)
    matcher = matcher_of(one, LIST)
    first = allowed_by(mask_of(matcher))[:1]
    (own,) = levels_of(one)["sequence"]
    os.kill(own, signal.SIGSTOP)  # busy for longer than any grammar takes
    wait_until(lambda: state_of(own) == "T")
    matcher.advance(first)
    left = {zygote_of(one), *processes_of(one)}
    one.close()
    wait_until(lambda: not any(map(is_running, left)))
    with pytest.raises(ConstraintLost):
        wait_until(matcher.poll)


def test_the_vocabulary_is_read_when_the_first_zygote_starts_and_serves_all_later_ones(spaces) -> None:
    reads: list[str] = []
    one = ConstraintCompiler(lambda: (reads.append("read"), spaces.encode())[1], eos_ids=[EOS], vocab_size=320)
    assert not reads
    first = allowed_by(mask_of(matcher_of(one, LIST)))
    killed = zygote_of(one)
    hit([killed], signal.SIGKILL)
    wait_until(lambda: not is_running(killed))
    assert allowed_by(mask_of(matcher_of(one, OTHER))) != first and reads == ["read"]
    one.close()


def test_a_vocabulary_that_cannot_be_read_fails_constraints_until_it_can(spaces, monkeypatch, caplog) -> None:
    """The file may be gone for a moment, for instance while somebody empties the cache. The log names the cause."""
    monkeypatch.setattr("server.constraints.retries.FIRST_PAUSE_S", 0.001)
    faults: list[Exception] = [OSError("no such file")] * (MAX_LOSSES + 1)

    def read() -> bytes:
        if faults:
            raise faults.pop()
        return spaces.encode()

    one = ConstraintCompiler(read, eos_ids=[EOS], vocab_size=320)
    with pytest.raises(ConstraintLost):
        matcher_of(one, LIST)
    assert not faults and "no such file" in caplog.text
    assert allowed_by(mask_of(matcher_of(one, LIST)))
    one.close()


def test_an_optional_call_waits_for_its_grammar_and_fails_rather_than_go_without_it(spaces, monkeypatch) -> None:
    """Without its grammar the call would have other bytes, because the machine had no process or descriptor for a while."""
    monkeypatch.setattr("server.constraints.retries.FIRST_PAUSE_S", 0.001)
    faults: list[Exception] = [OSError(errno.EMFILE, "too many open files")] * (MAX_LOSSES + 1)

    def read() -> bytes:
        if faults:
            raise faults.pop()
        return spaces.encode()

    one = ConstraintCompiler(read, eos_ids=[EOS], vocab_size=320)
    with pytest.raises(ConstraintLost):
        matcher_of(one, OFFER)
    matcher = matcher_of(one, OFFER)
    matcher.advance([TRIGGER])
    assert allowed_by(mask_of(matcher))
    one.close()


ASKS = {
    "mask": lambda matcher: matcher.mask(),
    "forced": lambda matcher: matcher.forced(),
    "advance": lambda matcher: matcher.advance([ord("a")]),
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_an_optional_call_whose_process_is_always_lost_is_not_set_free(compiler, monkeypatch, asks) -> None:
    matcher = matcher_of(compiler(), OFFER)

    def none_left(self: Grammar) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Grammar, "open_child", none_left)
    monkeypatch.setattr("server.constraints.retries.MAX_LOSSES", 0)
    monkeypatch.setattr("server.constraints.retries.FIRST_PAUSE_S", 0.0)
    matcher.advance([TRIGGER])
    with pytest.raises(ConstraintLost, match="too many open files"):
        asks(matcher)


WORKER = """
import sys, time
from server.constraints.compiler import ConstraintCompiler
from server.messages import Constraint, ConstraintKind
tokenizer, *sources = open(sys.argv[1]).read().split(chr(0))
compiler = ConstraintCompiler(tokenizer.encode, eos_ids=[0], vocab_size=320)
matchers = [compiler.open(Constraint(ConstraintKind.GRAMMAR, source)) for source in sources]
for matcher in matchers:
    while not matcher.poll():
        time.sleep(0.001)
    matcher.mask()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [0, signal.SIGSTOP], ids=["running", "stopped"])
def test_nobody_outlives_a_worker_that_is_killed(spaces, tmp_path, number) -> None:
    path = tmp_path / "sources"
    path.write_text("\0".join([spaces, OTHER.source, HEAVY.source]))
    with subprocess.Popen([sys.executable, "-c", WORKER, path], stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
            left = below(worker.pid)
            assert len(left) == 5, "expected the zygote and one process per grammar and sequence"
            hit(left, number)
        finally:
            worker.kill()
    wait_until(lambda: not any(map(is_running, left)))


def test_a_tokenizer_that_could_not_be_written_is_written_by_the_next_start(tokenizer_json, monkeypatch) -> None:
    """The `tokenizer.json` can be read only once here, so the zygote keeps its bytes for the next start."""
    write, num_failed = Zygote._write, 0

    def fails_once(self: Zygote, tokenizer_json: bytes) -> None:
        nonlocal num_failed
        if not num_failed:
            num_failed += 1
            raise OSError(28, "No space left on device")
        write(self, tokenizer_json)

    monkeypatch.setattr(Zygote, "_write", fails_once)
    compiler = ConstraintCompiler([tokenizer_json.encode()].pop, eos_ids=[EOS], vocab_size=VOCAB)
    try:
        assert mask_of(matcher_of(compiler, LIST)) is not None
        assert num_failed == 1
    finally:
        compiler.close()
