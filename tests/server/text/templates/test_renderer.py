"""Templates are rendered in a separate process. The prompt is the same as if the front rendered it, and no other request waits."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import pickle
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from server.text.templates.errors import TemplateError, TemplateLimitError, TemplateRejection
from server.text.templates.outside import OutsideTemplate
from server.text.templates.renderer import PATIENCE_S, Renderer
from server.text.templates.sandbox import MeteredEnvironment
from server.text.templates.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Grüße 世界 "}] * 2000
SOURCE = "{{ bos_token }}{% for m in messages %}{% for i in range(20) %}{{ m.content | trim }}{% endfor %}{% endfor %}{{ extra }}"
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


def rendered(renderer: Renderer, messages: list[dict[str, Any]] = MESSAGES, **variables: Any) -> Any:
    return renderer.render(messages, None, add_generation_prompt=True, continue_final_message=False, variables=variables)


def process_of(renderer: Renderer) -> int:
    assert renderer._calls._process is not None
    return renderer._calls._process._process.pid


def process_of_after(renderer: Renderer) -> int:
    asyncio.run(rendered(renderer, extra=""))
    return process_of(renderer)


def test_nothing_from_outside_is_compiled_or_rendered_in_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template from outside is compiled, checked and rendered in its process, even a short one."""

    def refuse(*_args: object) -> None:
        raise AssertionError("the front runs a template")

    monkeypatch.setattr(MeteredEnvironment, "template", refuse)
    monkeypatch.setattr(MeteredEnvironment, "rendered", refuse)
    template = OutsideTemplate(SOURCE, {"bos_token": "<s>"})
    assert asyncio.run(rendered(template.renderer(), MESSAGES[:1], extra=1)).startswith("<s>Grüße")
    assert template.render(MESSAGES[:1], variables={"extra": 1}).endswith("1")
    with pytest.raises(TemplateError, match="line 2") as caught:
        OutsideTemplate("fine\n{% if %}", {}).check()
    assert caught.value.line == 2


UNMETERED = """
from server.text.templates.meter import Meter
from server.text.templates.template import ChatTemplate

class Unmetered:
    def __reduce__(self):
        return unmetered, ()

def unmetered():
    Meter.step = Meter.charge = Meter._look = lambda *_: None
    loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'spin' %}" + loops + "{% endif %}"
    return ChatTemplate(source, {})
"""


@pytest.mark.usefixtures("without_collector")
def test_without_the_meter_no_template_delays_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the meter disabled, the kernel ends a template that never ends, and the event loop takes turns all the while. CPU time of the
    front's thread between two turns does not depend on other processes."""
    (tmp_path / "unmetered_of_test.py").write_text(UNMETERED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    renderer = Renderer(importlib.import_module("unmetered_of_test").Unmetered())
    delays_s: list[float] = []

    async def turns() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            delays_s.append(time.thread_time() - last_s)
            last_s = time.thread_time()

    async def hostile() -> None:
        await rendered(renderer, [{"content": "start"}])
        task = asyncio.create_task(turns())
        async with asyncio.timeout(PATIENCE_S):
            while len(children_of(process_of(renderer)).split()) != 1:
                await asyncio.sleep(0.01)
            asking = asyncio.create_task(rendered(renderer, [{"content": "spin"}]))
            while len(delays_s) < 200:
                await asyncio.sleep(0.01)
        assert not asking.done()
        asking.cancel()
        task.cancel()

    asyncio.run(hostile())
    assert max(delays_s) < 0.05


def test_long_conversations_give_the_same_text() -> None:
    """The rendering process returns the text that the front would render, including integers of any size."""
    template = ChatTemplate(SOURCE, {"bos_token": "<s>"})
    renderer = Renderer(template)
    variables = {"extra": [10**30, 1.5, None, True, {"a": "b"}]}
    assert asyncio.run(rendered(renderer, **variables)) == template.render(MESSAGES, variables=variables)
    assert renderer._calls._process is not None


@pytest.mark.parametrize(
    ("source", "kind", "message", "line"),
    [
        (LOOP + "\n", TemplateLimitError, "longer than 2 s", 1),
        ("\n{% set s = 'x' * 3000000 %}{{ raise_exception('no: ' ~ s[:3]) }}", TemplateRejection, "no: xxx", 2),
        ("{% set s = 'x' * 3000000 %}\n{{ s.a.b }}", TemplateError, "has no attribute 'a'", 2),
        ("{% set s = 'x' * 3000000 %}{{ '\\ud800' }}", TemplateError, "U+D800", None),
    ],
)
def test_errors_are_those_of_a_rendering_in_place(source: str, kind: type, message: str, line: int | None) -> None:
    with pytest.raises(TemplateError, match=message.replace("+", r"\+")) as caught:
        asyncio.run(rendered(Renderer(ChatTemplate(source, {})), MESSAGES[:1]))
    assert type(caught.value) is kind and caught.value.line == line


@pytest.mark.usefixtures("without_collector")
def test_a_template_that_never_ends_holds_up_nobody() -> None:
    """While a template with an endless loop runs until its time limit, the event loop is not blocked, and another rendering of the same
    template finishes."""
    renderer = Renderer(ChatTemplate("{% if messages | length > 1 %}" + LOOP + "{% else %}{{ 'x' * 3000000 }}{% endif %}", {}))
    ended: list[str] = []

    async def hostile() -> None:
        with pytest.raises(TemplateLimitError):
            await rendered(renderer, MESSAGES[:2])
        ended.append("hostile")

    async def long() -> None:
        assert len(await rendered(renderer, MESSAGES[:1])) == 3000000
        ended.append("long")

    async def both() -> float:
        await rendered(renderer, MESSAGES[:1])  # starts the rendering process
        task = asyncio.create_task(hostile())
        began_s = time.thread_time()
        await long()
        await task
        return time.thread_time() - began_s

    assert asyncio.run(both()) < 0.5, "the front's own thread did the work"
    assert ended == ["long", "hostile"]


def test_an_ended_process_is_replaced_and_the_request_continued() -> None:
    renderer = Renderer(ChatTemplate(SOURCE, {"bos_token": ""}))

    async def killed() -> str:
        await rendered(renderer, extra="")
        task = asyncio.create_task(rendered(renderer, extra="again"))
        await asyncio.sleep(0)
        os.killpg(process_of(renderer), signal.SIGKILL)
        return await task

    first = process_of_after(renderer)
    text = asyncio.run(killed())
    assert text.endswith("again") and process_of(renderer) != first


def test_a_stopped_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal stops the rendering process, the first attempt times out. The second attempt runs in a new process and has enough
    time."""
    renderer = Renderer(ChatTemplate(SOURCE, {"bos_token": ""}))
    os.killpg(stopped := process_of_after(renderer), signal.SIGSTOP)
    start = renderer._calls._started

    def started() -> object:
        process = start()
        renderer._calls.patience_s = 0.2 if process_of(renderer) == stopped else 60.0
        return process

    monkeypatch.setattr(renderer._calls, "_started", started)
    assert asyncio.run(rendered(renderer, extra="again")).endswith("again")
    assert process_of(renderer) != stopped


def test_two_late_renderings_are_reported_as_a_busy_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two rendering processes do not answer in time, the error says that the server is busy. It does not say that the template used too
    much CPU time or memory."""
    renderer = Renderer(ChatTemplate(SOURCE, {"bos_token": ""}))
    renderer._calls.patience_s = 0.2
    start = renderer._calls._started

    def stopped() -> object:
        process = start()
        os.killpg(process_of(renderer), signal.SIGSTOP)
        return process

    monkeypatch.setattr(renderer._calls, "_started", stopped)
    with pytest.raises(TemplateError, match=r"not rendered within 0\.2 s because the server is busy"):
        asyncio.run(rendered(renderer))


def test_the_end_of_the_work_may_come_after_the_work() -> None:
    """The front may close its sending side only after the process has read the request. An earlier version took this for the death of the
    front, and the client got a time-out error."""
    renderer = Renderer(ChatTemplate(LOOP, {}))
    near, far = socket.socketpair()
    with near:
        with far:
            assert renderer._calls._started().hand_over(far.fileno())
        near.sendall(pickle.dumps(((MESSAGES, None, True, False), {"variables": {}}, 0.0)))
        time.sleep(0.3)
        near.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: near.recv(1 << 20), b""))
    assert b"longer than 2 s" in answer


def test_who_hangs_up_ends_the_rendering_and_the_last_reference_ends_the_process() -> None:
    async def hung_up(renderer: Renderer) -> None:
        await rendered(renderer, MESSAGES[:1])
        task = asyncio.create_task(rendered(renderer, MESSAGES[:2]))
        while len(children_of(process_of(renderer)).split()) < 2:  # the rendering, and the fork that waits for the next one
            await asyncio.sleep(0.01)
        task.cancel()
        while len(children_of(process_of(renderer)).split()) > 1:
            await asyncio.sleep(0.01)

    renderer = Renderer(ChatTemplate("{% if messages | length > 1 %}" + LOOP + "{% else %}{{ 'x' * 3000000 }}{% endif %}", {}))
    asyncio.run(hung_up(renderer))
    pid = process_of(renderer)
    del renderer
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def children_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


INTRUDER = """
import socket

class Intruder:
    def render(self, messages, *args, **options):
        while messages[0]["content"] == "spin":
            pass
        attempts = {"file": lambda: open("/proc/self/environ"), "socket": socket.socket, "memory": lambda: bytearray(4 << 30)}
        return ",".join(name for name, attempt in attempts.items() if succeeds(attempt)) or "nothing"

def succeeds(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return False
    return True
"""


@pytest.fixture
def intruder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renderer:
    """Return a renderer whose template runs arbitrary Python code, as if the template had escaped the sandbox."""
    (tmp_path / "intruder_of_test.py").write_text(INTRUDER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Renderer(importlib.import_module("intruder_of_test").Intruder())


def test_a_process_that_renders_can_open_nothing(intruder: Renderer) -> None:
    """A rendering process cannot open files or sockets, and its memory is limited."""
    assert asyncio.run(rendered(intruder, MESSAGES[:1])) == "nothing"


def test_the_kernel_ends_what_the_meter_does_not_see(intruder: Renderer) -> None:
    intruder._calls._job.call_s = 0.5  # instead of 4 s of CPU time, which two tries would use
    intruder._calls.patience_s = 600.0  # on a busy machine, the allowed CPU time takes longer
    with pytest.raises(TemplateLimitError, match="rendering was ended"):
        asyncio.run(rendered(intruder, [{"content": "spin"}]))
