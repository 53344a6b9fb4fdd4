"""The tokenizer of a model whose chat template shows how much the model should think."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.doubles.worker import ByteTokenizer, NullTemplate

SHOWN = ("enable_thinking", "reasoning_effort")


class ThinkingTemplate(NullTemplate):
    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        told = {name: value for name, value in (variables or {}).items() if name in SHOWN}
        text = super().render(messages, tools, add_generation_prompt, continue_final_message, variables=variables)
        return f"{told}{text}" if told else text


def thinking() -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ThinkingTemplate()
    return tokenizer
