"""<tool_call>
<function=f>
<parameter=path>
notes.txt
</parameter>
</function>
</tool_call>

Written by Qwen3-Coder, Qwen 3.5 and later, and Nemotron 3.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.tagged_calls import TaggedCalls

FORMAT = BlockFormat(
    name="qwen3-coder",
    aliases=("qwen3_coder", "qwen3_xml"),
    calls=TaggedCalls(
        opening="<tool_call>",
        before_name="<function=",
        after_name=">",
        before_key="<parameter=",
        after_key={">": None},
        after_value="</parameter>",
        after_call="</function>",
        closing="</tool_call>",
        padding="\n",
    ),
)
