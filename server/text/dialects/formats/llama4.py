"""<|python_start|>{"name": "f", "parameters": {...}}<|python_end|>, usually without the markers

Written by Llama 4 with the template of its model files.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(
    name="llama4",
    aliases=("llama4_json",),
    calls=JsonCalls(opening="<|python_start|>", closing="<|python_end|>", bare=True, arguments_key="parameters", between='";"? " "?'),
)
