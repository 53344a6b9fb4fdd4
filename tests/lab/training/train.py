"""Train the demo model from scratch on the generated corpus and write it as a Hugging Face folder.

    python -m tests.lab.training.train --work /tmp/demo-train

Training takes two hours on two idle CPU cores. A stopped run continues from its last checkpoint. With `--start`, a run begins with the
weights of a snapshot instead of random weights, and needs a lower learning rate.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from deploy.demo import MODEL
from tests.lab.training.network import Llama, Shape
from tests.lab.training.packing import Batch, batches
from tests.lab.training.vocabulary import END_OF_TEXT, END_OF_TURN

_SEED = 7
_TOKENS_PER_BATCH = 8_192
_ROW_LENGTHS = (512, 512, 512, 512, 512, 512, 512, 1024)
_WARMUP_STEPS = 60
_CHECKPOINT_EVERY = 50
# decay of the running mean of the weights. A snapshot contains this mean, because before the end of training it is better than the weights
# of any single step
_AVERAGE_DECAY = 0.96


class Trainer:
    def __init__(self, shape: Shape, *, steps: int, learning_rate: float) -> None:
        self.steps, self.learning_rate, self.step = steps, learning_rate, 0
        self.model = Llama(shape)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(_AVERAGE_DECAY))
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        # Muon trains the layers' matrices in far fewer steps than AdamW, which trains the other parameters.
        self.optimizers = (
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.98)),
        )
        self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, token_ids: Tensor, weights: Tensor, document_ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model.logits(self.model(token_ids[:, :-1], document_ids[:, :-1]))
        each = F.cross_entropy(logits.float().flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none")
        return (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()

    def advance(self, batch: Batch) -> float:
        self._set_learning_rate()
        columns = (batch.token_ids, batch.weights, batch.document_ids)
        loss = self.loss(*(torch.from_numpy(column) for column in columns))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.average.update_parameters(self.model)
        self.step += 1
        return loss.item()

    def _set_learning_rate(self) -> None:
        warm = min(1.0, (self.step + 1) / _WARMUP_STEPS)
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, self.step / self.steps))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * warm * (0.02 + 0.98 * cosine)

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "average": self.average, "matrices": self.optimizers[0], "others": self.optimizers[1]}
        torch.save({"step": self.step, **{name: part.state_dict() for name, part in parts.items()}}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def restore(self, path: Path) -> None:
        state = torch.load(path)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, name in zip(self.optimizers, ("matrices", "others"), strict=True):
            optimizer.load_state_dict(state[name])


def export(model: nn.Module, shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the weights in bf16 and the two configurations. `vocabulary` writes the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = (tokenizer.get_vocab()[token] for token in (END_OF_TURN, END_OF_TEXT))
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")
    configurations = {
        "config.json": shape.hf_config(bos_token_id=pad, eos_token_id=end),
        "generation_config.json": {
            "bos_token_id": pad,
            "eos_token_id": [end, pad],
            "pad_token_id": pad,
            "do_sample": True,
            "temperature": 0.3,
            "top_p": 0.95,
        },
    }
    for name, content in configurations.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL, help="folder for the snapshots")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--start", type=Path, help="folder with the weights to begin with; by default they are random")
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()

    torch.manual_seed(_SEED)
    torch.set_num_threads(given.threads)
    shape = Shape()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    trainer = Trainer(shape, steps=given.steps, learning_rate=given.learning_rate)
    checkpoint = given.work / "state.pt"
    given.work.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        trainer.restore(checkpoint)
    elif given.start is not None:
        trainer.model.load_state_dict(load_file(given.start / "model.safetensors"))
    # A resumed run uses a new seed, because the old seed would give the same texts again.
    stream = batches(tokenizer, _SEED + trainer.step, tokens_per_batch=_TOKENS_PER_BATCH, lengths=_ROW_LENGTHS)
    started, first = time.perf_counter(), trainer.step
    while trainer.step < given.steps:
        loss = trainer.advance(next(stream))
        if trainer.step % 10 == 0:
            rate = (trainer.step - first) * _TOKENS_PER_BATCH / (time.perf_counter() - started)
            print(f"step {trainer.step}/{given.steps} loss {loss:.4f} {rate:.0f} tokens/s", flush=True)
        if trainer.step % _CHECKPOINT_EVERY == 0 or trainer.step == given.steps:
            trainer.save(checkpoint)
            export(trainer.average.module, shape, tokenizer, given.out)


if __name__ == "__main__":
    main()
