"""The formats whose calls and thoughts stand between markers: one entry each, below a comment that shows what a model writes. The only
other format is in harmony.py."""

from __future__ import annotations

from dataclasses import replace

from server.text.dialects.blocks import BlockFormat
from server.text.dialects.calls.gemma_calls import GemmaCalls
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.dialects.calls.named_calls import NamedCalls
from server.text.dialects.calls.python_calls import PythonCalls
from server.text.dialects.calls.syntax import MISTRAL_ID_LENGTH
from server.text.dialects.calls.tagged_calls import TaggedCalls
from server.text.dialects.thoughts import THINK, Thoughts

DSML = TaggedCalls(
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

GLM = TaggedCalls(
    opening="<tool_call>",
    before_key="<arg_key>",
    after_key={"</arg_key>": None},
    before_value="<arg_value>",
    after_value="</arg_value>",
    after_call="</tool_call>",
)

TABLE = (
    # Written by Command R7B, Command A and later, with thoughts between <|START_THINKING|> and <|END_THINKING|>.
    # <|START_ACTION|>[
    #     {"tool_call_id": "0", "tool_name": "f", "parameters": {...}}
    # ]<|END_ACTION|>
    BlockFormat(
        name="command-a",
        aliases=("cohere_command3",),
        calls=JsonCalls(
            opening="<|START_ACTION|>",
            closing="<|END_ACTION|>",
            listed=True,
            between=None,
            number_key="tool_call_id",
            name_key="tool_name",
            arguments_key="parameters",
        ),
        thoughts=(Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),),
    ),
    # Written by DeepSeek V3 and R1.
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    # ```json
    # {...}
    # ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    BlockFormat(
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
    ),
    # Written by DeepSeek V3.1.
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    BlockFormat(
        name="deepseek-v3.1",
        aliases=("deepseek_v31", "deepseekv31"),
        calls=NamedCalls(
            opening="<｜tool▁calls▁begin｜>",
            call_opening="<｜tool▁call▁begin｜>",
            before_arguments="<｜tool▁sep｜>",
            call_closing="<｜tool▁call▁end｜>",
            closing="<｜tool▁calls▁end｜>",
        ),
    ),
    # Written by DeepSeek V3.2. The tag of a parameter says whether the value is text or JSON.
    # <｜DSML｜function_calls>
    # <｜DSML｜invoke name="f">
    # <｜DSML｜parameter name="path" string="true">notes.txt</｜DSML｜parameter>
    # <｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>
    # </｜DSML｜invoke>
    # </｜DSML｜function_calls>
    BlockFormat(name="deepseek-v3.2", aliases=("deepseek_v32", "deepseekv32"), calls=DSML),
    # Written by DeepSeek V4: as in V3.2, with other markers.
    # <｜DSML｜tool_calls>
    # <｜DSML｜invoke name="f">
    # <｜DSML｜parameter name="path" string="true">notes.txt</｜DSML｜parameter>
    # </｜DSML｜invoke>
    # </｜DSML｜tool_calls>
    BlockFormat(
        name="deepseek-v4",
        aliases=("deepseek_v4",),
        calls=replace(DSML, opening="<｜DSML｜tool_calls>", closing="</｜DSML｜tool_calls>"),
    ),
    # Written by FunctionGemma.
    # <start_function_call>call:f{path:<escape>notes.txt<escape>,count:3}<end_function_call>
    BlockFormat(
        name="functiongemma",
        aliases=("function_gemma",),
        calls=GemmaCalls(opening="<start_function_call>", closing="<end_function_call>", quote="<escape>", between=""),
    ),
    # Written by Gemma 4, with thoughts in a channel of their own.
    # <|tool_call>call:f{path:<|"|>notes.txt<|"|>,count:3}<tool_call|>
    BlockFormat(
        name="gemma4",
        calls=GemmaCalls(opening="<|tool_call>", closing="<tool_call|>", quote='<|"|>', between=""),
        thoughts=(Thoughts("<|channel>", "<channel|>", label="thought\n"),),
    ),
    # Written by GLM-4.5 and GLM-4.6.
    # <tool_call>f
    # <arg_key>path</arg_key>
    # <arg_value>notes.txt</arg_value>
    # </tool_call>
    BlockFormat(name="glm45", calls=GLM),
    # Written by GLM-4.7 and later: as in GLM-4.5, without line ends.
    # <tool_call>f<arg_key>path</arg_key><arg_value>notes.txt</arg_value></tool_call>
    BlockFormat(name="glm47", calls=replace(GLM, line="", between="")),
    # Written by Granite 3. Granite 4 writes calls as Hermes does.
    # <|tool_call|>[{"name": "f", "arguments": {...}}, ...]
    BlockFormat(
        name="granite",
        calls=JsonCalls(opening="<|tool_call|>", listed=True, between=None),
    ),
    # Written by Hermes, Qwen 2.5 and Qwen 3, Granite 4, EXAONE 4, SmolLM 3 and many others.
    # <tool_call>
    # {"name": "f", "arguments": {...}}
    # </tool_call>
    BlockFormat(
        name="hermes",
        aliases=("qwen", "qwen25", "ernie45"),
        calls=JsonCalls(opening="<tool_call>", closing="</tool_call>"),
    ),
    # Written by Hunyuan A13B.
    # <tool_calls>[{"name": "f", "arguments": {...}}, ...]</tool_calls>
    BlockFormat(
        name="hunyuan",
        aliases=("hunyuan_a13b",),
        calls=JsonCalls(opening="<tool_calls>", closing="</tool_calls>", listed=True, between=None),
    ),
    # Written by Kimi K2, in one line. The text before the arguments is the call's id, and the template writes that id again.
    # <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
    # <|tool_call_end|><|tool_calls_section_end|>
    BlockFormat(
        name="kimi-k2",
        aliases=("kimi_k2",),
        calls=NamedCalls(
            opening="<|tool_calls_section_begin|>",
            call_opening="<|tool_call_begin|>",
            before_name="functions.",
            numbered=True,
            before_arguments="<|tool_call_argument_begin|>",
            call_closing="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
        ),
    ),
    # Written by LFM2.
    # <|tool_call_start|>[f(path="notes.txt", count=3), g()]<|tool_call_end|>
    BlockFormat(name="lfm2", calls=PythonCalls(opening="<|tool_call_start|>", closing="<|tool_call_end|>")),
    # Written by Llama 3.1 and later, usually without the marker, and one call in an answer.
    # <|python_tag|>{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    BlockFormat(
        name="llama3",
        aliases=("llama3_json",),
        calls=JsonCalls(opening="<|python_tag|>", bare=True, arguments_key="parameters", between='";" " "?'),
    ),
    # Written by Llama 4 with the template of its model files.
    # <|python_start|>{"name": "f", "parameters": {...}}<|python_end|>, usually without the markers
    BlockFormat(
        name="llama4",
        aliases=("llama4_json",),
        calls=JsonCalls(opening="<|python_start|>", closing="<|python_end|>", bare=True, arguments_key="parameters", between='";"? " "?'),
    ),
    # Written by MiniMax-M2. One pair of markers may hold several calls.
    # <minimax:tool_call>
    # <invoke name="f">
    # <parameter name="path">notes.txt</parameter>
    # </invoke>
    # </minimax:tool_call>
    BlockFormat(
        name="minimax-m2",
        aliases=("minimax_m2",),
        calls=TaggedCalls(
            opening="<minimax:tool_call>",
            before_name='<invoke name="',
            after_name='">',
            before_key='<parameter name="',
            after_key={'">': None},
            after_value="</parameter>",
            after_call="</invoke>",
            closing="</minimax:tool_call>",
            listed=True,
            between=None,
        ),
    ),
    # The ids of calls have nine letters and digits; templates refuse other ids. Magistral writes thoughts between [THINK] and [/THINK].
    # [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]      Mistral's models up to 2024
    # [TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{...}                models of mid-2025, whose templates write the id again
    # [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}          later models
    BlockFormat(
        name="mistral",
        calls=JsonCalls(
            opening="[TOOL_CALLS]",
            listed=True,
            arguments_marker="[ARGS]",
            id_marker="[CALL_ID]",
            between='" "?',
            id_length=MISTRAL_ID_LENGTH,
        ),
        thoughts=(THINK, Thoughts("[THINK]", "[/THINK]")),
    ),
    # Written by Llama Nemotron and Nemotron Nano 2. Nemotron 3 writes calls as Qwen3-Coder does.
    # <TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>
    BlockFormat(
        name="nemotron",
        aliases=("nemotron_json",),
        calls=JsonCalls(opening="<TOOLCALL>", closing="</TOOLCALL>", listed=True, between=None),
    ),
    # Written by OLMo 3.
    # <function_calls>
    # f(path="notes.txt", count=3)
    # g()
    # </function_calls>
    BlockFormat(
        name="olmo3",
        calls=PythonCalls(opening="<function_calls>", closing="</function_calls>", list_opening="\n", list_closing="\n", comma="\n"),
    ),
    # Written by Phi-4 mini.
    # functools[{"name": "f", "arguments": {...}}, ...]
    BlockFormat(
        name="phi4",
        aliases=("phi4_mini_json",),
        calls=JsonCalls(opening="functools", listed=True, between=None),
    ),
    # {"name": "f", "arguments": {...}}, alone or in a list, and nothing else: the format of models whose template shows no other format.
    BlockFormat(name="json", calls=JsonCalls(bare=True, between='";" " "?')),
    # Written by Llama 4, and by Llama 3.2 if its prompt asks for it.
    # [f(path="notes.txt", count=3), g()], alone or between <|python_start|> and <|python_end|>
    BlockFormat(
        name="pythonic",
        aliases=("llama4_pythonic",),
        calls=PythonCalls(opening="<|python_start|>", closing="<|python_end|>", bare=True),
    ),
    # Written by Qwen3-Coder, Qwen 3.5 and later, and Nemotron 3. Qwen3-Coder sometimes leaves out the first line.
    # <tool_call>
    # <function=f>
    # <parameter=path>
    # notes.txt
    # </parameter>
    # </function>
    # </tool_call>
    BlockFormat(
        name="qwen3-coder",
        aliases=("qwen3_coder", "qwen3_xml"),
        calls=TaggedCalls(
            opening="<tool_call>",
            before_name="<function=",
            after_name=">",
            before_key="<parameter=",
            after_key={">": None},
            after_value="</parameter>",
            after_call="</function>",
            closing="</tool_call>",
            padding="\n",
            may_lack_opening=True,
        ),
    ),
    # Written by Seed-OSS, with thoughts between <seed:think> and </seed:think>.
    # <seed:tool_call>
    # <function=f>
    # <parameter=path>notes.txt</parameter>
    # </function>
    # </seed:tool_call>
    BlockFormat(
        name="seed-oss",
        aliases=("seed_oss",),
        calls=TaggedCalls(
            opening="<seed:tool_call>",
            before_name="<function=",
            after_name=">",
            before_key="<parameter=",
            after_key={">": None},
            after_value="</parameter>",
            after_call="</function>",
            closing="</seed:tool_call>",
        ),
        thoughts=(Thoughts("<seed:think>", "</seed:think>"),),
    ),
)
