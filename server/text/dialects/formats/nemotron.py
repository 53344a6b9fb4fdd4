"""<TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>

Written by Llama Nemotron and Nemotron Nano 2. Nemotron 3 writes calls as Qwen3-Coder does.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(
    name="nemotron",
    aliases=("nemotron_json",),
    calls=JsonCalls(opening="<TOOLCALL>", closing="</TOOLCALL>", listed=True, between=None),
)
