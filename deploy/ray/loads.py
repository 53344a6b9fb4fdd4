"""How many requests each replica has from this process. The ingress counts, and the router, which runs in a thread beside it, reads.

Ray unpickles a copy of the router's module, but imports this one, so both sides see the same counts.
"""

from __future__ import annotations

from collections import Counter

open_requests: Counter[str] = Counter()  # by the name of the replica; only the ingress's event loop writes
