"""<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "f", "parameters": {...}}
]<|END_ACTION|>

Written by Command R7B, Command A and later, with thoughts between <|START_THINKING|> and <|END_THINKING|>.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.dialects.thoughts import Thoughts

FORMAT = BlockFormat(
    name="command-a",
    aliases=("cohere_command3",),
    calls=JsonCalls(
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        listed=True,
        between=None,
        number_key="tool_call_id",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    thoughts=(Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),),
)
