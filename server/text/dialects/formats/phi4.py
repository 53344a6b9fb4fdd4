"""functools[{"name": "f", "arguments": {...}}, ...]

Written by Phi-4 mini.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(
    name="phi4",
    aliases=("phi4_mini_json",),
    calls=JsonCalls(opening="functools", listed=True, between=None),
)
