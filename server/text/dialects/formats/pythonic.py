"""[f(path="notes.txt", count=3), g()], alone or between <|python_start|> and <|python_end|>

Written by Llama 4, and by Llama 3.2 if its prompt asks for it.
"""

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.python_calls import PythonCalls

FORMAT = BlockFormat(
    name="pythonic",
    aliases=("llama4_pythonic",),
    calls=PythonCalls(opening="<|python_start|>", closing="<|python_end|>", bare=True),
)
