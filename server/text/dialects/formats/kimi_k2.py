"""<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|><|tool_calls_section_end|>

Written by Kimi K2. The text before the arguments is the call's id, and the template writes that id again.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.named_calls import NamedCalls

FORMAT = BlockFormat(
    name="kimi-k2",
    aliases=("kimi_k2",),
    calls=NamedCalls(
        opening="<|tool_calls_section_begin|>",
        call_opening="<|tool_call_begin|>",
        before_name="functions.",
        numbered=True,
        before_arguments="<|tool_call_argument_begin|>",
        call_closing="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
)
