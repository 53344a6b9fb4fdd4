"""<|python_tag|>{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}

Written by Llama 3.1 and later, usually without the marker, and one call in an answer.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(
    name="llama3",
    aliases=("llama3_json",),
    calls=JsonCalls(opening="<|python_tag|>", bare=True, arguments_key="parameters", between='";" " "?'),
)
