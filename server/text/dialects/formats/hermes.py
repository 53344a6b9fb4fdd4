"""<tool_call>
{"name": "f", "arguments": {...}}
</tool_call>

Written by Hermes, Qwen 2.5 and Qwen 3, Granite 4, EXAONE 4, SmolLM 3 and many others.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(
    name="hermes",
    aliases=("qwen", "qwen25", "ernie45"),
    calls=JsonCalls(opening="<tool_call>", closing="</tool_call>"),
)
