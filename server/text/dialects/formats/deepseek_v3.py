"""<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Written by DeepSeek V3 and R1.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.named_calls import NamedCalls

FORMAT = BlockFormat(
    name="deepseek-v3",
    aliases=("deepseek_v3", "deepseekv3"),
    calls=NamedCalls(
        opening="<｜tool▁calls▁begin｜>",
        call_opening="<｜tool▁call▁begin｜>",
        before_name="function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after_arguments="\n```",
        call_closing="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        gap="\n",
    ),
)
