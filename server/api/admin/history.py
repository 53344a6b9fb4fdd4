"""GET /admin/history: return the last hour of the metrics that the console's live page draws."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from server.api.context import Context
from server.api.routes import ADMINISTRATION, gives, new_router
from server.history import INTERVAL_S, Change, Series


class SeriesName(TypedDict):
    name: str
    labels: Mapping[str, str]


class HistorySample(TypedDict):
    """The values of the metrics at one time."""

    time: float
    values: Mapping[str, float | None]  # changed values by the index of their series; null: the series has ended


class HistoryReport(TypedDict):
    """The samples of the last hour. `series` has the name of each series, in the order of the indices."""

    object: Literal["history"]
    interval_s: float
    series: Sequence[SeriesName]
    samples: Sequence[HistorySample]


def router(context: Context) -> APIRouter:
    routes = new_router(ADMINISTRATION, prefix="/admin")

    @routes.get("/history", responses=gives(HistoryReport))
    async def get_history() -> Response:
        """Return the last hour of the metrics that the console draws, one sample every 5 s. The first sample has all values, each further
        one only those that have changed."""
        return Response(await asyncio.to_thread(_report, context.history.samples()), media_type="application/json")

    return routes


def _report(changes: Sequence[Change]) -> bytes:
    """Return the samples as JSON. This takes long with many busy models, so the endpoint calls it on a thread."""
    indices: dict[Series, str] = {}
    samples: list[HistorySample] = [
        {
            "time": change.time_s,
            "values": {indices.setdefault(series, str(len(indices))): value for series, value in change.values.items()},
        }
        for change in changes
    ]
    report: HistoryReport = {
        "object": "history",
        "interval_s": INTERVAL_S,
        "series": [{"name": name, "labels": dict(labels)} for name, labels in indices],
        "samples": samples,
    }
    return msgspec.json.encode(report)
