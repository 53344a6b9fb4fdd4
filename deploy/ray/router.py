"""The request router: the replica that has most of the prompt in its prefix cache, unless others have much less to do.

Ray calls `choose_replicas` for each lease, with the ingress's wish as the first argument.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray import loads
from deploy.ray.owners import Owners
from deploy.ray.ranking import ranked
from deploy.ray.wish import Wish


class PrefixRouter(RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._owners = Owners()
        self._leasing: dict[str, int] = {}  # leases that are on their way
        self._present: frozenset[str] = frozenset()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wish = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(wish, Wish) or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        stats = {name: replica.routing_stats for name, replica in by_name.items()}
        here = {name: loads.open_requests[name] + self._leasing.get(name, 0) for name in by_name}
        order = ranked(wish, here, stats, self._owners)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name = replica_id.unique_id
        self._leasing[name] = self._leasing.get(name, 0) + 1
        wish = pending_request.args[0] if pending_request.args else None
        if isinstance(wish, Wish):
            self._owners.learn(wish.keys, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name = replica_id.unique_id
        self._leasing[name] = max(0, self._leasing.get(name, 0) - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        present = frozenset(replica.replica_id.unique_id for replica in replicas)
        if self._present - present:
            self._owners.forget(present)
            self._leasing = {name: count for name, count in self._leasing.items() if name in present}
        self._present = present
