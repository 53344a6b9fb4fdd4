"""Two tasks may send on one WebSocket, however slowly its client reads."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.http.answer_framing import _upgrading


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = list[bytes]()
        self.is_closed = False

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def test_two_tasks_send_while_the_client_pauses() -> None:
    async def run() -> list[bytes]:
        transport, log = Transport(), logging.getLogger("test")
        flow = FlowControl(transport)
        cycle = RequestResponseCycle(
            scope={"method": "GET"},  # type: ignore[arg-type,typeddict-item]
            transport=transport,
            flow=flow,
            logger=log,
            access_logger=log,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=lambda: None,
        )
        send = _upgrading(cycle, cycle.send)  # type: ignore[arg-type]
        await send({"type": "http.response.start", "status": 101, "headers": []})
        flow.pause_writing()
        sends = [
            asyncio.create_task(send({"type": "http.response.body", "body": body, "more_body": more}))  # type: ignore[arg-type]
            for body, more in ((b"x" * 500, True), (b"y" * 40, True), (b"z" * 500, True), (b"", True), (b"end", False))
        ]
        sends[2].cancel()
        await asyncio.sleep(0)
        assert len(transport.written) == 1, "the head"
        flow.resume_writing()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [type(None)] * 2 + [asyncio.CancelledError] + [type(None)] * 2
        assert transport.is_closed
        return transport.written[1:]

    assert asyncio.run(run()) == [b"x" * 500, b"y" * 40, b"", b"end"]
