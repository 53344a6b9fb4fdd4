"""<tool_calls>[{"name": "f", "arguments": {...}}, ...]</tool_calls>

Written by Hunyuan A13B.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(
    name="hunyuan",
    aliases=("hunyuan_a13b",),
    calls=JsonCalls(opening="<tool_calls>", closing="</tool_calls>", listed=True, between=None),
)
