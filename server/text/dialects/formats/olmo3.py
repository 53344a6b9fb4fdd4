"""<function_calls>
f(path="notes.txt", count=3)
g()
</function_calls>

Written by OLMo 3.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.python_calls import PythonCalls

FORMAT = BlockFormat(
    name="olmo3",
    calls=PythonCalls(opening="<function_calls>", closing="</function_calls>", list_opening="\n", list_closing="\n", comma="\n"),
)
