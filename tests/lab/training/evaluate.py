"""Ask the model the held-out questions and count exact answers per skill.

python -m tests.lab.training.evaluate --base-url http://127.0.0.1:8000/v1     # a running server
python -m tests.lab.training.evaluate --snapshot deploy/demo/model            # the files, through PyTorch
"""

import argparse
import json
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.demo import MODEL
from tests.lab.training.conversation import Message
from tests.lab.training.exam import Question, questions

_SEED = 4711
_CONCURRENT_REQUESTS = 8
_REQUEST_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Server:
    """A server with the Chat Completions API, of any vendor."""

    base_url: str
    model: str

    def answers(self, asked: Sequence[Question]) -> list[Message]:
        with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
            return list(pool.map(self._answer, asked))

    def _answer(self, question: Question) -> Message:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": on_the_wire(question.messages),
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        if question.tools:
            body["tools"] = question.tools
        if question.schema is not None:
            demanded = {"name": "answer", "schema": question.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": demanded}
        request = urllib.request.Request(
            f"{self.base_url.rstrip('/')}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_LIMIT_S) as response:
            answer: Message = json.load(response)["choices"][0]["message"]
        for call in answer.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return answer


def on_the_wire(messages: Sequence[Message]) -> list[Message]:
    """Convert messages to the API's format: calls have ids, their arguments are JSON text, and each result names its call."""
    sent: list[Message] = []
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            named: list[Message] = []
            for index, call in enumerate(message["tool_calls"]):
                function = call["function"]
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                call_id = f"call_{number}_{index}"
                unanswered.append(call_id)
                named.append({**call, "id": call_id, "function": {"name": function["name"], "arguments": arguments}})
            sent.append({**message, "tool_calls": named})
        elif message["role"] == "tool":
            sent.append({**message, "tool_call_id": unanswered.pop(0)})
        else:
            sent.append(message)
    return sent


def report(asked: Sequence[Question], answers: Sequence[Message], *, failures: int) -> str:
    """Return a Markdown table, followed by up to `failures` wrong answers per skill."""
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    wrong: list[str] = []
    shown: Counter[str] = Counter()
    for question, answer in zip(asked, answers, strict=True):
        total[question.skill] += 1
        if question.is_right(answer):
            right[question.skill] += 1
        elif shown[question.skill] < failures:
            shown[question.skill] += 1
            wrong.append(f"[{question.skill}] {_brief(question.messages[-1])} -> {_brief(answer)} expected {_brief(question.expected)}")
    rows = [f"| {skill} | {right[skill]} / {count} | {right[skill] / count:.1%} |" for skill, count in total.items()]
    rows.append(f"| all | {right.total()} / {total.total()} | {right.total() / total.total():.1%} |")
    return "\n".join(("| skill | right | share |", "|---|---|---|", *rows, *wrong))


def _brief(message: Message) -> str:
    if message.get("tool_calls"):
        return "; ".join(f"{call['function']['name']}({json.dumps(call['function']['arguments'])})" for call in message["tool_calls"])
    return repr(message.get("content"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="the API of a running server, ending in /v1")
    where.add_argument("--snapshot", type=Path, help="a model folder, run through PyTorch")
    parser.add_argument("--model", default="demo", help="model name sent to the server")
    parser.add_argument("--per-skill", type=int, default=100)
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to show per skill")
    given = parser.parse_args()

    asked = questions(_SEED, given.per_skill)
    if given.snapshot is None:
        answers = Server(given.base_url, given.model).answers(asked)
    else:
        from tests.lab.training.greedy import Snapshot  # PyTorch is needed for this option only

        asked = [question for question in asked if question.schema is None]  # only a server can enforce a schema
        answers = Snapshot(given.snapshot, MODEL / "tokenizer.json").answers(asked)
    print(report(asked, answers, failures=given.failures))


if __name__ == "__main__":
    main()
