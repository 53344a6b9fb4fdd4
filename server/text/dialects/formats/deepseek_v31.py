"""<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Written by DeepSeek V3.1.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.named_calls import NamedCalls

FORMAT = BlockFormat(
    name="deepseek-v3.1",
    aliases=("deepseek_v31", "deepseekv31"),
    calls=NamedCalls(
        opening="<｜tool▁calls▁begin｜>",
        call_opening="<｜tool▁call▁begin｜>",
        before_arguments="<｜tool▁sep｜>",
        call_closing="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
)
