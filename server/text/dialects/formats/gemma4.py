"""<|tool_call>call:f{path:<|"|>notes.txt<|"|>,count:3}<tool_call|>

Written by Gemma 4, with thoughts in a channel of their own.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.gemma_calls import GemmaCalls
from server.text.dialects.thoughts import Thoughts

FORMAT = BlockFormat(
    name="gemma4",
    calls=GemmaCalls(opening="<|tool_call>", closing="<tool_call|>", quote='<|"|>', between=""),
    thoughts=(Thoughts("<|channel>", "<channel|>", label="thought\n"),),
)
