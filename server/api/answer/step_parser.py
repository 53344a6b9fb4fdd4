"""Parse the steps of a chat answer into thoughts, calls and content. Every chat API builds its answers from these parts."""

from __future__ import annotations

from server.api.answer.generate import Generation, Step
from server.open_values import turn_to
from server.text.dialects.calls.characters import ends_early
from server.text.dialects.format import AnswerRules
from server.text.parts import CallArguments, CallStart, Part


class StepParser:
    """Parses the steps of all choices of an answer, and counts tokens of thoughts."""

    def __init__(self, generation: Generation, rules: AnswerRules, num_choices: int = 1) -> None:
        self._generation = generation
        self._parsers = [rules.parser() for _ in range(num_choices)]
        # for each choice, pieces of the arguments of its last call; None: the choice has written no call, or has written something after
        # its last call
        self._arguments: list[list[str] | None] = [None] * num_choices

    def parse(self, step: Step) -> tuple[list[Part], str | None]:
        """Return the parts that a step adds to its choice, and the reason if the choice ends: `stop`, `length` or `tool_calls`; otherwise
        None. The reason is not `tool_calls` if the choice stops within a call. If the parser needs no further tokens, abort the choice in
        the worker."""
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
        self._follow(step.choice, parts)
        if finish is not None:
            rest = parser.finish()
            if self._arguments[step.choice] == [] and (finish == "length" or isinstance(step.stop_reason, str)):
                # The call was cut off before its arguments. Remove the empty object that the parser may have added as the arguments.
                rest = [part for part in rest if not isinstance(part, CallArguments)]
            self._follow(step.choice, rest)
            parts += rest
        if finish == "stop" and parser.num_calls and not self.is_in_call(step.choice):
            finish = "tool_calls"
        return parts, finish

    def is_in_call(self, choice: int) -> bool:
        """Return whether the choice has begun a call whose arguments are not complete. For example, a stop string may have ended the choice
        within the call."""
        arguments = self._arguments[choice]
        return arguments is not None and ends_early("".join(arguments))

    def _follow(self, choice: int, parts: list[Part]) -> None:
        """Store the arguments of the choice's last call."""
        for part in parts:
            match part:
                case CallStart():
                    self._arguments[choice] = []
                case CallArguments(text=text):
                    arguments = self._arguments[choice]
                    assert arguments is not None, "a call begins with its CallStart"
                    arguments.append(text)
                case _:
                    self._arguments[choice] = None
