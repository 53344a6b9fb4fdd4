"""[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]      Mistral's models up to 2024
[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}          later ones

The ids of calls have nine letters and digits; templates refuse others.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.dialects.calls.syntax import MISTRAL_ID_LENGTH

FORMAT = BlockFormat(
    name="mistral",
    calls=JsonCalls(opening="[TOOL_CALLS]", listed=True, arguments_marker="[ARGS]", between='" "?', id_length=MISTRAL_ID_LENGTH),
)
