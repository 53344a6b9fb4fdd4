"""`relaxserve generate`: answer one prompt in this process, without a server."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.output import answers, errors, stages
from deploy.cli.sources import PROGRAM, Source, load_of, takes

if TYPE_CHECKING:
    from deploy.generate import Answer


@takes(*PROGRAM)
def generate(
    model: Source,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to answer or to continue.")],
    raw: Annotated[bool, typer.Option(help="Continue the text itself, without the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of the answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**64 - 1, help="Seed of the sampler. Equal seeds give equal answers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer with its token ids and times as JSON.")] = False,
    **form: Any,
) -> None:
    """Answer one prompt in this process, without a server, and print the text as it is generated.

    [bold]Examples[/bold]

      relaxserve generate demo -p "What is the capital of France?"

      relaxserve generate ~/models/Llama-3.2-1B -p "Once upon a time" --raw --temperature 0.8 --seed 7 --json
    """
    from deploy.generate import Prompt, generate_text, require_generator
    from deploy.model_loading.load import loaded

    load = load_of(model, max_batch=1, **form)
    began_s = time.perf_counter()
    with stages(load.name) as report:
        servable = require_generator(load, report)
        generator = loaded(servable)
    load_s = time.perf_counter() - began_s
    asked = Prompt(prompt, raw, max_tokens, temperature, seed % 2**64)  # a negative seed counts as seed + 2**64, as in the server
    answer = generate_text(servable.tokenizer, generator, asked, (lambda _: None) if as_json else _write)
    if as_json:
        answers.print_json(json.dumps({"text": answer.text, **_figures(answer), "load_s": round(load_s, 3)}))
        return
    answers.file.write("\n")
    errors.print(
        f"{answer.num_prompt} prompt tokens in {1000 * answer.prefill_s:.0f} ms, {len(answer.token_ids)} generated in "
        f"{1000 * answer.decode_s:.0f} ms; {answer.finish_reason}",
        style="dim",
        highlight=False,
    )


def _write(text: str) -> None:
    answers.file.write(text)
    answers.file.flush()


def _figures(answer: Answer) -> dict[str, object]:
    """Return the figures of an answer for JSON, without its text."""
    return {
        "token_ids": answer.token_ids,
        "num_prompt": answer.num_prompt,
        "finish_reason": answer.finish_reason,
        "prefill_s": round(answer.prefill_s, 4),
        "decode_s": round(answer.decode_s, 4),
    }
