"""[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]      Mistral's models up to 2024
[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}          later ones

The ids of calls have nine letters and digits; templates refuse others. Magistral writes thoughts between [THINK] and [/THINK].
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.dialects.calls.syntax import MISTRAL_ID_LENGTH
from server.text.dialects.thoughts import THINK, Thoughts

FORMAT = BlockFormat(
    name="mistral",
    calls=JsonCalls(opening="[TOOL_CALLS]", listed=True, arguments_marker="[ARGS]", between='" "?', id_length=MISTRAL_ID_LENGTH),
    thoughts=(THINK, Thoughts("[THINK]", "[/THINK]")),
)
