"""Grammars of clients, in processes of their own: they allow what they would in the worker, bother nobody, and leave nobody behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.engine.confined import ConfinedMatcher, Line
from server.engine.constrain import ConstraintCompiler, ConstraintLimits
from server.engine.grammars import ANSWER, Tell
from server.engine.loop import Engine
from server.engine.matcher import ConstraintError, ConstraintLost
from server.engine.overlap import OverlappedEngine
from server.messages import Abort, Constraint, ConstraintKind, FinishReason, SamplingParams, Submit

EOS, VOCAB = 0, 320
ENGINES = pytest.mark.parametrize("engine", [Engine, OverlappedEngine])


def grammar(source: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, source, by_client=True)


LITERAL = grammar('start: "the colour of the name is " colour "!"\ncolour: "green" | "greek"')
LIST = grammar('start: item ("," " "? item)*\nitem: /[a-f]{1,4}/ | "(" start ")"')
SCHEMA = grammar("start: %json " + json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}))
DEEP = grammar('start: r\nr: "a" r | "b"')
GRAMMARS = LITERAL, LIST, SCHEMA, DEEP


def heavy(num_rules: int, what: str) -> Constraint:
    """Its first mask takes many seconds where tokens are long runs of spaces."""
    names = [f"e{i}" for i in range(num_rules)]
    rules = [f'{name}: {" | ".join(f"{name} {other}" for other in names)} | "{what}"' for name in names]
    return grammar("\n".join(["start: e0", *rules]))


HEAVY = heavy(30, " ")


@pytest.fixture(scope="module")
def spaces() -> str:
    """A tokenizer with runs of up to 32 spaces."""
    letters = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("Ġ" * length for length in range(2, 33))]
    merges = [("Ġ" * (length - 1), "Ġ") for length in range(2, 33)]
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.get_vocab_size() < VOCAB
    return tokenizer.to_str()


@pytest.fixture
def compiler(spaces: str) -> Iterable[Callable[..., ConstraintCompiler]]:
    compilers: list[ConstraintCompiler] = []

    def make(**limits) -> ConstraintCompiler:
        compilers.append(ConstraintCompiler(spaces, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(**limits)))
        return compilers[-1]

    yield make
    for one in compilers:
        one.close()


def matcher_of(compiler: ConstraintCompiler, constraint: Constraint):
    pending = compiler.compile(constraint)
    while (matcher := pending.poll()) is None:
        time.sleep(0.001)
    return matcher


def answered(matcher: ConfinedMatcher) -> ConfinedMatcher:
    while not matcher.poll():
        time.sleep(0.001)
    return matcher


def mask_of(matcher: ConfinedMatcher):
    matcher.ask_mask()
    return answered(matcher).mask()


def allowed_by(mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def submit_of(name: str, constraint: Constraint | None = None, max_tokens: int = 20, **params) -> Submit:
    return Submit(name, (5, 6, 7), SamplingParams(max_tokens=max_tokens, constraint=constraint, ignore_eos=True, **params))


def below(pid: int) -> set[int]:
    """All that descends from a process, as far as it runs."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


# --- what they allow -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constraint", GRAMMARS)
def test_each_token_is_judged_as_in_the_worker(constraints, constraint) -> None:
    rng = np.random.default_rng(3)
    for _ in range(4):
        here = matcher_of(constraints, msgspec.structs.replace(constraint, by_client=False))
        there = matcher_of(constraints, constraint)
        assert isinstance(there, ConfinedMatcher)
        for _ in range(60):
            assert answered(there).is_complete == here.is_complete
            if here.is_complete:
                break
            there.forced()
            assert answered(there).forced() == here.forced()
            assert np.array_equal(mask_of(there), here.mask())
            token_ids = here.forced() if rng.random() < 0.5 and here.forced() else [int(rng.choice(allowed_by(here.mask())))]
            if token_ids == [EOS]:
                break
            for matcher in (here, there):
                for token_id in token_ids:
                    matcher.advance([token_id])


def test_what_is_forced_is_asked_for_once(constraints) -> None:
    matcher = matcher_of(constraints, LITERAL)
    matcher.forced()
    forced = answered(matcher).forced()
    asked = []
    ask = matcher._ask
    matcher._ask = lambda what: (asked.append(what), ask(what))
    for token_id in forced:
        matcher.advance([token_id])
    assert len(forced) > 3 and len(asked) == 1
    del matcher._ask


@ENGINES
def test_late_answers_change_no_token(rig, constraints, random_submits, monkeypatch, engine) -> None:
    rng = random.Random(8)

    def with_grammar(submit: Submit, by_client: bool, index: int) -> Submit:
        if submit.params.constraint is None:
            return submit
        constraint = msgspec.structs.replace(GRAMMARS[index], by_client=by_client)
        return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, constraint=constraint))

    drawn = [(submit, rng.randrange(len(GRAMMARS))) for submit in random_submits(50, 5)]
    expected = rig(constraints=constraints).run([with_grammar(submit, False, index) for submit, index in drawn])
    receive = Line.receive
    monkeypatch.setattr(Line, "receive", lambda self, patience_s: (patience_s is None or rng.random() < 0.5) and receive(self, None))
    one = rig(engine, constraints=constraints)
    set_aside, num_late = one.engine._requests.set_aside, []
    monkeypatch.setattr(one.engine._requests, "set_aside", lambda seq: (num_late.append(seq), set_aside(seq)))
    outcomes = one.run([with_grammar(submit, True, index) for submit, index in drawn])
    assert not one.failed and len(num_late) > 50
    assert outcomes == expected


@ENGINES
def test_who_is_resumed_goes_on_where_it_was(rig, constraints, engine) -> None:
    whole = rig(engine, constraints=constraints).run([submit_of("a", LITERAL, seed=2, logprobs=0)])["a", 0]
    assert whole.end == (FinishReason.STOP, None)
    for num_told in (1, 4, len(whole.token_ids)):
        told = tuple(whole.token_ids[:num_told])
        rest = msgspec.structs.replace(submit_of("a", LITERAL, seed=2), emitted=(told,))
        outcome = rig(engine, constraints=constraints).run([rest])["a", 0]
        assert [*told, *outcome.token_ids] == whole.token_ids and outcome.end == whole.end


def test_a_cached_grammar_is_compiled_once(constraints) -> None:
    first = matcher_of(constraints, LIST)
    assert mask_of(first) is not None
    processes = below(os.getpid())
    second = matcher_of(constraints, LIST)
    assert np.array_equal(mask_of(second), mask_of(first))
    assert len(below(os.getpid()) - processes) == 1


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("start: other", "cannot be compiled"), ('start: "' + "a" * 300_000 + '"', "expected at most")],
)
def test_a_bad_grammar_fails_its_request_alone(rig, constraints, source, complaint) -> None:
    one = rig(constraints=constraints)
    one.run([submit_of("bad", grammar(source)), submit_of("plain")])
    assert one.failed["bad"].code == "invalid_schema" and complaint in one.failed["bad"].message
    assert len(one.outcomes["plain", 0].token_ids) == 20


def test_a_tokenizer_that_cannot_be_read_fails_the_request_and_not_the_engine(rig) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    compiler = ConstraintCompiler(words.to_str(), eos_ids=[EOS], vocab_size=VOCAB)
    one = rig(constraints=compiler)
    one.run([submit_of("a", LIST)])
    assert "tokenizer" in one.failed["a"].message
    compiler.close()


# --- what they may use ---------------------------------------------------------------------------------------------------


@ENGINES
def test_a_heavy_mask_fails_its_requests_and_holds_up_nobody(rig, compiler, engine) -> None:
    one = rig(engine, constraints=compiler())
    one.run([submit_of("light", LIST)])  # the process is there
    others = below(os.getpid())
    for submit in (submit_of("heavy", HEAVY), submit_of("heavy too", HEAVY)):
        one.engine.submit(submit)
    one.until(lambda: len(one.engine._requests._aside) == 2, max_steps=1_000_000)
    heavy_ones = below(os.getpid()) - others
    for pid in heavy_ones:
        os.kill(pid, signal.SIGSTOP)  # for however long they take
    for submit in (submit_of("plain"), submit_of("light too", LIST)):
        one.engine.submit(submit)
    one.until(lambda: all(name in one.outcomes and one.outcomes[name].end for name in (("plain", 0), ("light too", 0))), 1_000_000)
    assert not one.failed
    for pid in heavy_ones:
        os.kill(pid, signal.SIGCONT)
    one.run()
    assert set(one.failed) == {"heavy", "heavy too"}
    for failed in one.failed.values():
        assert failed.code == "invalid_schema" and "1 s more than the 20 ms that each may" in failed.message


def test_whose_masks_are_slow_is_not_waited_for(monkeypatch) -> None:
    """However fast it takes in tokens between them."""
    monkeypatch.setattr("server.engine.confined.PATIENCE_S", 1000.0)
    near, far = socket.socketpair()
    with far:
        terms = SimpleNamespace(slow_s=0.02, vocab_size=0)
        matcher = ConfinedMatcher(SimpleNamespace(begin=lambda: near, terms=terms))
        for mask_s, is_next_waited_for in ((0.5, False), (0.01, True)):
            far.sendall(ANSWER.pack(Tell.MASK, 0, mask_s, 0) + ANSWER.pack(Tell.STATE, 0, 0.0, 0))
            assert mask_of(matcher) is not None
            matcher.advance([5])
            assert not matcher.is_late
            matcher.ask_mask()
            assert (matcher._give_way_s > time.monotonic()) is is_next_waited_for


def test_many_slow_tokens_are_too_many(rig, compiler, monkeypatch) -> None:
    monkeypatch.setattr("server.engine.constrain.SLOW_S", 0.0)
    monkeypatch.setattr("server.engine.constrain.EXCESS_S", 0.01)
    one = rig(constraints=compiler())
    one.run([submit_of("slow", grammar('start: e\ne: e e | "a" | "b"'), max_tokens=400, banned_token_ids=(EOS,))])
    assert one.failed["slow"].code == "invalid_schema"


def test_compiling_takes_a_while_at_most(compiler) -> None:
    one = compiler(compile_s=0.05, grammar_size=10_000_000, source_bytes=10 << 20)
    process = one._grammars
    with pytest.raises(ConstraintError, match=re.escape("took more than 0.05 s of the processor")):
        process.compile(heavy(200, "a").source)
    assert process.compile(LIST.source).is_alive


@ENGINES
def test_memory_is_bounded(rig, compiler, engine) -> None:
    one = rig(engine, constraints=compiler(memory_bytes=4 << 20))
    large = grammar("start: " + " ".join(f'"word {i}"' for i in range(8000)))
    one.run([submit_of("large", large), submit_of("light", LIST), submit_of("plain")])
    assert one.failed["large"].code == "invalid_schema" and "more than 4 MiB of memory" in one.failed["large"].message
    assert len(one.outcomes["plain", 0].token_ids) == 20 and one.outcomes["light", 0].end is not None


# --- how they end --------------------------------------------------------------------------------------------------------


def begun(compiler: ConstraintCompiler, constraint: Constraint) -> tuple[ConfinedMatcher, int]:
    """A matcher that has its process, and that."""
    before = matcher_of(compiler, constraint)  # the grammar is there
    others = below(os.getpid())
    matcher = matcher_of(compiler, constraint)
    matcher.forced()
    (own,) = below(os.getpid()) - others
    del before
    return answered(matcher), own


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_takes_its_sequence_alone(compiler, number) -> None:
    one = compiler()
    matcher, own = begun(one, LIST)
    other, _ = begun(one, LIST)
    os.kill(own, number)
    wait_until(lambda: not is_running(own))
    token_id = allowed_by(mask_of(matcher))[0]  # it was made ahead
    with pytest.raises(ConstraintLost, match=f"ended by {number.name}"):
        matcher.advance([token_id])
        answered(matcher)
    assert mask_of(other) is not None


def test_the_servers_loss_is_not_the_clients_error(rig, compiler) -> None:
    one = rig(constraints=compiler())
    one.engine.submit(submit_of("a", LIST, max_tokens=400))
    one.until(lambda: one.outcomes, max_steps=1_000_000)
    for pid in below(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not below(os.getpid()))
    one.run([submit_of("plain")])
    assert one.failed["a"].code == "generation_failed" and "was ended" in one.failed["a"].message
    assert one.run([submit_of("b", LIST)])["b", 0].end is not None, "it is started again"


def test_a_grammar_whose_process_died_is_compiled_again(compiler) -> None:
    one = compiler()
    matcher_of(one, DEEP)
    others = below(os.getpid())
    matcher_of(one, LIST)
    (own,) = below(os.getpid()) - others
    os.kill(own, signal.SIGKILL)
    wait_until(lambda: not one._cache[LIST].result().is_alive)
    assert mask_of(matcher_of(one, LIST)) is not None


def test_a_sequence_that_is_let_go_leaves_no_process(compiler) -> None:
    one = compiler()
    matcher, own = begun(one, LIST)
    del matcher
    wait_until(lambda: not is_running(own))
    others = below(os.getpid())
    busy = matcher_of(one, HEAVY)
    assert busy.mask() is None and busy.is_late
    (_, own) = sorted(below(os.getpid()) - others)
    del busy
    wait_until(lambda: not is_running(own))


@ENGINES
def test_an_aborted_request_leaves_no_process(rig, compiler, engine) -> None:
    constraints = compiler()
    for constraint in (HEAVY, LIST):
        matcher_of(constraints, constraint)
    one = rig(engine, constraints=constraints)
    others = below(os.getpid())
    one.engine.submit(submit_of("a", HEAVY))
    one.engine.submit(submit_of("b", LIST, max_tokens=400))
    one.until(lambda: one.engine._requests._aside, max_steps=1_000_000)
    assert below(os.getpid()) > others
    for name in "ab":
        one.engine.abort(Abort(name))
    wait_until(lambda: below(os.getpid()) <= others)
    one.run()


def test_an_evicted_grammar_ends_when_its_sequences_have(compiler) -> None:
    one = compiler(num_cached=1)
    matcher_of(one, DEEP)  # the common process is there
    common = below(os.getpid())
    matcher, own = begun(one, LIST)
    (grammar_process,) = below(os.getpid()) - common - {own}
    matcher_of(one, DEEP)
    assert mask_of(matcher) is not None and is_running(grammar_process)
    del matcher
    wait_until(lambda: not is_running(grammar_process))


def test_closing_ends_all_at_once(compiler) -> None:
    one = compiler()
    matcher = matcher_of(one, HEAVY)
    assert matcher.mask() is None
    one.close()
    wait_until(lambda: not below(os.getpid()))
    with pytest.raises(ConstraintLost):
        answered(matcher)
    with pytest.raises(ConstraintLost, match="cannot be started"):
        one._grammars.compile(LIST.source)


WORKER = """
import sys, time
from server.engine.constrain import ConstraintCompiler
from server.messages import Constraint, ConstraintKind
tokenizer, *sources = open(sys.argv[1]).read().split(chr(0))
compiler = ConstraintCompiler(tokenizer, eos_ids=[0], vocab_size=320)
matchers = []
for source in sources:
    pending = compiler.compile(Constraint(ConstraintKind.GRAMMAR, source, by_client=True))
    while (matcher := pending.poll()) is None:
        time.sleep(0.001)
    matcher.mask()
    matchers.append(matcher)
print("ready", flush=True)
time.sleep(600)
"""


def test_nobody_outlives_a_worker_that_is_killed(spaces, tmp_path) -> None:
    path = tmp_path / "sources"
    path.write_text("\0".join([spaces, LIST.source, HEAVY.source]))
    with subprocess.Popen([sys.executable, "-c", WORKER, path], stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
            left = below(worker.pid)
            assert len(left) == 5, "all of them: one for each grammar and sequence, and one above"
        finally:
            worker.kill()
    wait_until(lambda: not any(map(is_running, left)))


def test_a_budget_is_no_matter_of_other_processes(compiler) -> None:
    """A clock of the wall would fail who has to wait for the processor."""
    one = compiler()
    matcher, own = begun(one, LIST)
    token_id = allowed_by(mask_of(matcher))[0]
    os.kill(own, signal.SIGSTOP)
    matcher.advance([token_id])
    assert matcher.is_late
    time.sleep(1.2)
    os.kill(own, signal.SIGCONT)
    assert mask_of(answered(matcher)) is not None
