"""<tool_call>f<arg_key>path</arg_key><arg_value>notes.txt</arg_value></tool_call>

Written by GLM-4.7 and later: as in GLM-4.5, without lines.
"""

from dataclasses import replace

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.formats import glm45

FORMAT = BlockFormat(name="glm47", calls=replace(glm45.CALLS, line="", between=""))
