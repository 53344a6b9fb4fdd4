"""<tool_call>f
<arg_key>path</arg_key>
<arg_value>notes.txt</arg_value>
</tool_call>

Written by GLM-4.5 and GLM-4.6.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.tagged_calls import TaggedCalls

CALLS = TaggedCalls(
    opening="<tool_call>",
    before_key="<arg_key>",
    after_key={"</arg_key>": None},
    before_value="<arg_value>",
    after_value="</arg_value>",
    after_call="</tool_call>",
)
FORMAT = BlockFormat(name="glm45", calls=CALLS)
