"""Chat templates for models whose publishers ship none in Jinja, by the `model_type` of config.json.

Voxtral: transformers leaves its prompts to the package mistral-common, whose rules (version 7) this template repeats: system prompts
between tokens of their own, a token before the audio tokens of a recording, and parts in the order of the message. Like mistral-common, it
refuses a system prompt beside audio.
"""

from __future__ import annotations

from collections.abc import Mapping

VOXTRAL = """
{%- macro written(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}
    {%- for part in content -%}
      {%- if part['type'] == 'audio' -%}[BEGIN_AUDIO][AUDIO]{%- else -%}{{ part['text'] }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set found = namespace(system=false, audio=false) -%}
<s>
{%- for message in messages -%}
  {%- if message['content'] is not string and message['content'] | selectattr('type', 'equalto', 'audio') | list -%}
    {%- set found.audio = true -%}
  {%- endif -%}
  {%- if message['role'] == 'system' -%}
    {%- set found.system = true -%}
    [SYSTEM_PROMPT]{{ written(message['content']) }}[/SYSTEM_PROMPT]
  {%- elif message['role'] == 'user' -%}[INST]{{ written(message['content']) }}[/INST]
  {%- elif message['role'] == 'assistant' -%}{{ written(message['content']) }}</s>
  {%- else -%}{{ raise_exception('the roles of this model are system, user and assistant') }}
  {%- endif -%}
{%- endfor -%}
{%- if found.system and found.audio -%}
  {{ raise_exception('this model hears audio only in conversations without a system message; leave it out') }}
{%- endif -%}
"""
BUILT_IN: Mapping[str, str] = {"voxtral": VOXTRAL}
