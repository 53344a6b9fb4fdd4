"""Sort the replicas by how well they would serve a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from deploy.ray.owners import Owners
from deploy.ray.wish import Wish, place_of

# That a replica has the beginning of a prompt counts only if it has at most this many requests more than the least loaded replica: SLACK,
# or SLACK_SHARE of the requests of the least loaded replica if that is more.
SLACK = 4
SLACK_SHARE = 0.5
REQUEST_BLOCKS = 4  # each request of a replica is taken to delay a new request as much as the prefill of this many blocks


def ranked(wish: Wish, here: Mapping[str, int], stats: Mapping[str, Mapping[str, Any]], owners: Owners) -> Sequence[str]:
    """Return the replicas, the best one first. `here`: for each replica, the number of its requests from this process; `stats`: the reports
    of the replicas. Replicas that have failed the request come last. Of the others, the replica that must serve the request comes first,
    then those with room for more requests, then those without. Between replicas of the same kind, the expected delay decides, and then the
    number of requests."""
    load = {name: count + int(stats[name].get("num_others", 0)) for name, count in here.items()}
    since_s = {name: float(stats[name].get("kept_since_s", 0.0)) for name in here}
    least = min((load[name] for name in here if name not in wish.avoided), default=0)
    most = least + max(SLACK, int(least * SLACK_SHARE))
    kept = owners.num_kept(wish.keys, since_s)
    first = wish.keys[0] if wish.keys else b""

    def rank(name: str) -> tuple[bool, bool, bool, int, int, bytes]:
        has_no_room = load[name] > most
        spread = blake2b(first + name.encode(), digest_size=8).digest()  # ingresses that know no owner still agree on a replica
        is_elsewhere = not wish.place or place_of(name) != wish.place
        delay = REQUEST_BLOCKS * load[name] - (0 if has_no_room else kept[name])
        return name in wish.avoided, is_elsewhere, has_no_room, delay, load[name], spread

    return sorted(here, key=rank)
