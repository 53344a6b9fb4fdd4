"""Make the goldens of models that hear audio in conversations: small random models, and what transformers computes with them from
recordings of odd lengths.

python -m venv V; V/bin/pip install torch==2.13.0 transformers==5.24.0; V/bin/python -m tests.golden.make_listening [NAME...]

`golden.npz` of a model has, for each recording, its rows (rows_N); and for each conversation the prompt as text and as token ids, the
logits that follow it, and the greedy continuation. `weights.json` says how its weights are drawn. The processor of Voxtral needs
mistral-common, and a vocabulary as large as the real one, for its prompts; so they are written here as mistral-common writes them.
"""

from __future__ import annotations

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.golden.continuing import continued
from tests.golden.drawn import Draw, write_recipe
from tests.golden.filling import fill, tensors_of
from tests.golden.listening import CONVERSATIONS, LENGTHS, NUM_POSITIONS, SUBJECTS, WINDOW, Subject
from tests.golden.make_vision import tokenizer
from tests.golden.media import RATE


def write_files(subject: Subject) -> dict[str, Any]:
    """Write the files of a model beside its weights. Return the fields of its tokenizer."""
    subject.place.mkdir(parents=True, exist_ok=True)
    for name, value in (("config", subject.config), ("tokenizer", tokenizer(subject))):
        (subject.place / f"{name}.json").write_text(json.dumps(value, indent=None if name == "tokenizer" else 2) + "\n")
    fields = {"eos_token": subject.special[1], "bos_token": subject.special[0]}
    fields |= {"chat_template": subject.template} if subject.template else {}
    (subject.place / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return fields


def make(subject: Subject) -> None:
    import torch
    import transformers

    fields = write_files(subject)
    config = transformers.AutoConfig.from_pretrained(subject.place)
    kind = getattr(transformers, subject.config["architectures"][0])
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(subject.place / "tokenizer.json"), **fields)
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=WINDOW // RATE)
    given = Qwen2Audio(subject, words, extractor) if subject.name == "qwen2_audio" else Voxtral(subject, words, extractor)
    sounds = [subject.sound(number).astype(np.float32) / 32_768 for number in range(len(LENGTHS))]
    tensors = tensors_of(model)
    draws = {name: drawn(name, tensor) for name, tensor in tensors.items()}
    for seed in itertools.count():
        found: list[dict[str, Any]] = []
        with torch.no_grad():
            fill(tensors, draws, seed)
            for text, numbers in CONVERSATIONS:
                if (one := answered(subject, model, *given.inputs(text, [sounds[number] for number in numbers]))) is None:
                    break
                found.append(one)
        if len(found) == len(CONVERSATIONS):
            break
    arrays: dict[str, Any] = {}
    for number, sound in enumerate(sounds):
        with torch.no_grad():
            rows = given.rows(model, sound).numpy()
        arrays[f"rows_{number}"] = rows
    for number, one in enumerate(found):
        arrays |= {f"{name}_{number}": value for name, value in one.items()}
    np.savez_compressed(subject.place / "golden.npz", **arrays)
    write_recipe(subject.place, seed, draws)
    print(subject.name, f"seed {seed}", *(f"{name} {value.shape}" for name, value in arrays.items()), *tensors, sep="\n", flush=True)


class Qwen2Audio:
    """Makes the inputs of the model with its processor."""

    def __init__(self, subject: Subject, words: Any, extractor: Any) -> None:
        import transformers

        self.processor = transformers.Qwen2AudioProcessor(extractor, words, chat_template=subject.template)

    def inputs(self, text: str, sounds: list[Any]) -> tuple[str, dict[str, Any]]:
        content = [*({"type": "audio", "audio_url": "x"} for _ in sounds), {"type": "text", "text": text}]
        prompt = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
        given = self.processor(text=prompt, audio=sounds or None, sampling_rate=RATE, return_tensors="pt", add_special_tokens=False)
        return prompt, {name: given[name] for name in given if name not in ("attention_mask", "token_type_ids")}

    def rows(self, model: Any, sound: Any) -> Any:
        """Return the rows that take the places of a recording's tokens: the inputs of the decoder for a prompt of nothing else."""
        given = self.processor(text="<|AUDIO|>", audio=[sound], sampling_rate=RATE, return_tensors="pt", add_special_tokens=False)
        seen: list[Any] = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        model(**given)
        hook.remove()
        return seen[0][0]


class Voxtral:
    """Makes the inputs of the model: features with its processor, prompts as mistral-common does."""

    def __init__(self, subject: Subject, words: Any, extractor: Any) -> None:
        self.words, self.extractor, self.merge = words, extractor, subject.merge

    def features(self, sound: Any) -> Any:
        from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

        own = SimpleNamespace(feature_extractor=self.extractor)
        options = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": WINDOW}
        positions = options.pop("max_source_positions") and 2 * NUM_POSITIONS
        return VoxtralProcessor._retrieve_input_features(own, [sound], positions, **options)

    def inputs(self, text: str, sounds: list[Any]) -> tuple[str, dict[str, Any]]:
        import torch

        found = [self.features(sound) for sound in sounds]
        written = "".join("[BEGIN_AUDIO]" + "[AUDIO]" * (NUM_POSITIONS // self.merge * len(features)) for features in found)
        ids = self.words(f"<s>[INST]{written}{text}[/INST]", return_tensors="pt", add_special_tokens=False)["input_ids"]
        prompt = f"<s>[INST]{'[BEGIN_AUDIO][AUDIO]' * len(sounds)}{text}[/INST]"
        return prompt, {"input_ids": ids, **({"input_features": torch.cat(found)} if found else {})}

    def rows(self, model: Any, sound: Any) -> Any:
        return model.get_audio_features(self.features(sound), return_dict=True).pooler_output


def drawn(name: str, tensor: Any) -> Draw:
    """Describe how a tensor is drawn."""
    scale = 0.2 if tensor.ndim == 1 else 1.6 * tensor[0].numel() ** -0.5
    scale = 0.6 if "embed" in name else scale
    is_norm = "norm" in name and name.endswith("weight")
    return Draw(tuple(tensor.shape), round(scale, 4), 1.0 if is_norm else 0.0)


def answered(subject: Subject, model: Any, prompt: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """Return a conversation and its continuation, or None if two logits are nearly equal or the text repeats itself."""
    import torch

    ids = given.pop("input_ids")[0].tolist()

    def row_of(ids: list[int]) -> Any:
        every = torch.tensor([ids])
        return model(input_ids=every, attention_mask=torch.ones_like(every), use_cache=False, **given).logits[0, -1].numpy()

    return continued(prompt, ids, row_of, (subject.audio,))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SUBJECTS:
        make(SUBJECTS[chosen])
