"""Greedy answers straight from the PyTorch network, so that a snapshot can be examined while training goes on."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deploy.demo.conversation import Message
from deploy.demo.exam import Question
from deploy.demo.network import Llama, Shape
from deploy.demo.rendering import parsed_answer, render

_BATCH = 32


class Snapshot:
    def __init__(self, folder: Path, tokenizer_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.model = Llama(Shape(**{field: config[field] for field in Shape.__dataclass_fields__}))
        self.model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
        self.tokenizer = Tokenizer.from_file(str(tokenizer_path))
        self.ends = set(json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"])

    def answers(self, questions: Sequence[Question]) -> list[Message]:
        """Questions of like length go together; answers come back in the order asked."""
        prompts = [
            self.tokenizer.encode(render(question.messages, question.tools, add_generation_prompt=True)).ids for question in questions
        ]
        order = sorted(range(len(questions)), key=lambda at: (questions[at].max_tokens, len(prompts[at])))
        texts = [""] * len(questions)
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            limit = max(questions[at].max_tokens for at in chosen)
            for at, ids in zip(chosen, self._complete([prompts[at] for at in chosen], limit), strict=True):
                texts[at] = self.tokenizer.decode(ids)
        return [parsed_answer(text) for text in texts]

    @torch.inference_mode()
    def _complete(self, prompts: Sequence[list[int]], limit: int) -> list[list[int]]:
        rows = [list(prompt) for prompt in prompts]
        open_rows = set(range(len(rows)))
        for _ in range(limit):
            if not open_rows:
                break
            chosen = sorted(open_rows)
            longest = max(len(rows[row]) for row in chosen)
            ids = torch.tensor([rows[row] + [0] * (longest - len(rows[row])) for row in chosen])
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.model(ids, torch.zeros_like(ids))
                last = hidden[torch.arange(len(chosen)), torch.tensor([len(rows[row]) - 1 for row in chosen])]
                best = self.model.logits(last).argmax(dim=-1).tolist()
            for row, token_id in zip(chosen, best, strict=True):
                if token_id in self.ends:
                    open_rows.discard(row)
                else:
                    rows[row].append(token_id)
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
