"""<minimax:tool_call>
<invoke name="f">
<parameter name="path">notes.txt</parameter>
</invoke>
</minimax:tool_call>

Written by MiniMax-M2. One pair of markers may hold several calls.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.tagged_calls import TaggedCalls

FORMAT = BlockFormat(
    name="minimax-m2",
    aliases=("minimax_m2",),
    calls=TaggedCalls(
        opening="<minimax:tool_call>",
        before_name='<invoke name="',
        after_name='">',
        before_key='<parameter name="',
        after_key={'">': None},
        after_value="</parameter>",
        after_call="</invoke>",
        closing="</minimax:tool_call>",
        listed=True,
        between=None,
    ),
)
