"""<｜DSML｜tool_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="path" string="true">notes.txt</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>

Written by DeepSeek V4: as in V3.2, with other markers.
"""

from dataclasses import replace

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.formats import deepseek_v32

FORMAT = BlockFormat(
    name="deepseek-v4",
    aliases=("deepseek_v4",),
    calls=replace(deepseek_v32.CALLS, opening="<｜DSML｜tool_calls>", closing="</｜DSML｜tool_calls>"),
)
