"""<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="path" string="true">notes.txt</｜DSML｜parameter>
<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

Written by DeepSeek V3.2. A parameter says itself whether it is text or JSON.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.tagged_calls import TaggedCalls

CALLS = TaggedCalls(
    opening="<｜DSML｜function_calls>",
    before_name='<｜DSML｜invoke name="',
    after_name='">',
    before_key='<｜DSML｜parameter name="',
    after_key={'" string="true">': True, '" string="false">': False},
    after_value="</｜DSML｜parameter>",
    after_call="</｜DSML｜invoke>",
    closing="</｜DSML｜function_calls>",
    tokens=("｜DSML｜",),
    listed=True,
    between=None,
)
FORMAT = BlockFormat(name="deepseek-v3.2", aliases=("deepseek_v32", "deepseekv32"), calls=CALLS)
