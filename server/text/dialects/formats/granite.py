"""<|tool_call|>[{"name": "f", "arguments": {...}}, ...]

Written by Granite 3. Granite 4 writes calls as Hermes does.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(
    name="granite",
    calls=JsonCalls(opening="<|tool_call|>", listed=True, between=None),
)
