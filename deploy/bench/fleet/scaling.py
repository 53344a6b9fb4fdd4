"""Let the number of replicas of a cell follow its load, by the policy of a pool on Ray Serve (`deploy/ray/scaling.py`)."""

from __future__ import annotations

from deploy.bench.fleet.policies import Cell
from deploy.bench.fleet.replica import Replica
from deploy.ray.scaling import DOWNSCALE_DELAY_S, UPSCALE_DELAY_S, wanted

LOOK_S = 2.0  # interval at which the number of replicas is decided
START_S = 16.0  # seconds until a new replica is ready, as measured on Ray with a warm cache


class Scaler:
    """Starts and stops the replicas of a cell. A replica that stops gets no new requests, and is paid for until its requests have ended."""

    def __init__(self, cell: Cell, least: int, target_requests: float) -> None:
        """Let the first `least` replicas of the cell be up, and the others down. `least` is also the least number of replicas that the
        scaler wants. `target_requests` is the number of requests per replica that the policy aims at."""
        self.paid_s = 0.0  # seconds for which replicas are paid, summed over all of them
        self._cell = cell
        self._least = least
        self._target_requests = target_requests
        self._starting: dict[Replica, float] = {}  # replicas that were started -> the time at which they will be ready
        self._since_s: dict[bool, float] = {}  # True: the time since which more replicas are wanted; False: fewer
        for replica in cell.replicas[least:]:
            replica.is_up = False

    def look(self, now_s: float) -> None:
        """Let the cell run up to this time, count what its replicas cost since the last call, and start or stop replicas if another number
        has been wanted long enough. Replicas that have been starting for START_S come up. This is called every LOOK_S seconds."""
        self._cell.advance(now_s)
        for replica in [replica for replica, ready_s in self._starting.items() if ready_s <= now_s]:
            del self._starting[replica]
            replica.start()
        up = [replica for replica in self._cell.replicas if replica.is_up]
        stopping = sum(not replica.is_up and replica.num_requests > 0 for replica in self._cell.replicas)
        self.paid_s += LOOK_S * (len(up) + len(self._starting) + stopping)
        present = len(up) + len(self._starting)
        num_requests, pages = sum(replica.num_requests for replica in up), sum(replica.pages_share for replica in up)
        number = wanted(num_requests, pages, len(up), self._target_requests)
        number = min(max(number, self._least), len(self._cell.replicas))
        for more in (True, False):
            if number == present or (number > present) != more:
                self._since_s.pop(more, None)
            elif now_s - self._since_s.setdefault(more, now_s) >= (UPSCALE_DELAY_S if more else DOWNSCALE_DELAY_S):
                del self._since_s[more]
                if more:
                    self._start(number - present, now_s)
                else:
                    self._stop(up, present - number)

    def _start(self, number: int, now_s: float) -> None:
        """Begin to start at most `number` replicas that are down and have no requests."""
        free = [replica for replica in self._cell.replicas if not (replica.is_up or replica.num_requests or replica in self._starting)]
        self._starting.update(dict.fromkeys(free[:number], now_s + START_S))

    def _stop(self, up: list[Replica], number: int) -> None:
        """Stop `number` of the replicas that are up, those with the fewest requests, but leave one up."""
        most = len(up) - 1  # one replica stays up; those that are starting are not stopped
        for replica in sorted(up, key=lambda replica: replica.num_requests)[: min(number, most)]:
            replica.is_up = False
        self._cell.forget()
