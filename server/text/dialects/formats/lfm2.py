"""<|tool_call_start|>[f(path="notes.txt", count=3), g()]<|tool_call_end|>

Written by LFM2.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.python_calls import PythonCalls

FORMAT = BlockFormat(name="lfm2", calls=PythonCalls(opening="<|tool_call_start|>", closing="<|tool_call_end|>"))
