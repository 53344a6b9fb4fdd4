"""Answer greedily with the PyTorch network, so that a snapshot can be examined while training continues."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.lab.training.conversation import Message
from tests.lab.training.exam import Question
from tests.lab.training.network import Llama, Past, Shape
from tests.lab.training.rendering import parsed_answer, render


class Snapshot:
    def __init__(self, folder: Path, tokenizer_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.model = Llama(Shape(**{field: config[field] for field in Shape.__dataclass_fields__}))
        self.model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
        self.tokenizer = Tokenizer.from_file(str(tokenizer_path))
        self.ends = set(json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"])

    def answers(self, questions: Sequence[Question]) -> list[Message]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Message:
        prompt = render(question.messages, question.tools, add_generation_prompt=True)
        return parsed_answer(self.tokenizer.decode(self._complete(self.tokenizer.encode(prompt).ids, question.max_tokens)))

    @torch.inference_mode()
    def _complete(self, prompt: list[int], limit: int) -> list[int]:
        past = [Past() for _ in range(self.model.shape.num_hidden_layers)]
        answer: list[int] = []
        start, given = 0, prompt
        while len(answer) < limit:
            hidden = self.model.extend(torch.tensor([given]), start, past)
            token_id = int(self.model.logits(hidden[0, -1]).argmax())
            if token_id in self.ends:
                break
            start, given = start + len(given), [token_id]
            answer.append(token_id)
        return answer
