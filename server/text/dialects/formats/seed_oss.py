"""<seed:tool_call>
<function=f>
<parameter=path>notes.txt</parameter>
</function>
</seed:tool_call>

Written by Seed-OSS, with thoughts between <seed:think> and </seed:think>.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.tagged_calls import TaggedCalls
from server.text.dialects.thoughts import Thoughts

FORMAT = BlockFormat(
    name="seed-oss",
    aliases=("seed_oss",),
    calls=TaggedCalls(
        opening="<seed:tool_call>",
        before_name="<function=",
        after_name=">",
        before_key="<parameter=",
        after_key={">": None},
        after_value="</parameter>",
        after_call="</function>",
        closing="</seed:tool_call>",
    ),
    thoughts=(Thoughts("<seed:think>", "</seed:think>"),),
)
