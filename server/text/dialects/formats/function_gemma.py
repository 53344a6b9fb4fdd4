"""<start_function_call>call:f{path:<escape>notes.txt<escape>,count:3}<end_function_call>

Written by FunctionGemma.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.gemma_calls import GemmaCalls

FORMAT = BlockFormat(
    name="functiongemma",
    aliases=("function_gemma",),
    calls=GemmaCalls(opening="<start_function_call>", closing="<end_function_call>", quote="<escape>", between=""),
)
