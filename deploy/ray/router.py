"""The request router, which Ray tells about the replicas of a pool, and which chooses a replica for each lease that goes through Ray.

Ray calls `choose_replicas` with the ingress's wish as the first argument of the request.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray.directory import directory_of
from deploy.ray.wish import Wish


class PrefixRouter(RequestRouter):
    """Ranks replicas by the directory of the pool, and keeps the directory up to date."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._directory = directory_of(self._deployment_id.name)
        self._leasing: dict[str, int] = {}  # number of leases that Ray has asked for and that have not returned, by replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which Ray should try them for a lease. For a request without a wish, leave the choice to
        Ray."""
        wish = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(wish, Wish) or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = self._directory.rank(wish, {name: self._leasing.get(name, 0) for name in by_name})
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the lease, and remember that the replica gets the request with this wish."""
        name = replica_id.unique_id
        self._leasing[name] = self._leasing.get(name, 0) + 1
        wish = pending_request.args[0] if pending_request.args else None
        if isinstance(wish, Wish):
            self._directory.learn(wish, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name = replica_id.unique_id
        self._leasing[name] = max(0, self._leasing.get(name, 0) - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Pass the reports of the present replicas to the directory."""
        super().update_replicas(replicas)
        self._directory.hear({replica.replica_id.unique_id: replica.routing_stats for replica in replicas})
        self._leasing = {name: count for name, count in self._leasing.items() if count}
