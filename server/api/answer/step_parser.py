"""Parse the steps of a chat answer into thoughts, calls and content. Every chat API builds its answers from these parts."""

from __future__ import annotations

from server.api.answer.generate import Generation, Step
from server.open_values import turn_to
from server.text.dialects.format import AnswerRules
from server.text.parts import Part


class StepParser:
    """Parses the steps of all choices of an answer, and counts tokens of thoughts."""

    def __init__(self, generation: Generation, rules: AnswerRules, num_choices: int = 1) -> None:
        self._generation = generation
        self._parsers = [rules.parser() for _ in range(num_choices)]

    def parse(self, step: Step) -> tuple[list[Part], str | None]:
        """Return the parts that a step adds to its choice, and the reason if the choice ends: `stop`, `length` or `tool_calls`; otherwise
        None. If the parser needs no further tokens, abort the choice in the worker."""
        turn_to(step.choice)
        parser, usage = self._parsers[step.choice], self._generation.usage
        reasons = parser.reasons
        parts = parser.push(step.text) if step.text else []
        if reasons or parser.reasons:
            usage.reasoning_tokens += len(step.token_ids)
        finish = step.finish
        if finish is None and parser.done:
            self._generation.end(step.choice)
            finish = "stop"
        if finish is not None:
            parts += parser.finish()
            finish = "tool_calls" if parser.num_calls and finish == "stop" else finish
        return parts, finish
