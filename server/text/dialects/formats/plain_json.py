"""{"name": "f", "arguments": {...}}, alone or in a list, and nothing else: the format of models whose template shows no other."""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls

FORMAT = BlockFormat(name="json", calls=JsonCalls(bare=True, between='";" " "?'))
