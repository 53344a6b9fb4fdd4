"""docs/api.md lists the fields of each vendor's requests, as the other tests of this folder verify them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.api.vendors import openai_rows, test_anthropic, test_ollama
from tests.server.api.vendors.field import table

PAGE = Path(__file__).parents[4] / "docs" / "api.md"
BEGIN = "<!-- The tables below are written by tests/server/api/vendors/test_tables.py --update-golden. -->\n"
END = "<!-- end of the tables -->\n"
TABLES = {
    "OpenAI: `/v1/chat/completions`": openai_rows.CHAT,
    "OpenAI: `/v1/completions`": openai_rows.COMPLETIONS,
    "OpenAI: `/v1/embeddings`": openai_rows.EMBEDDINGS,
    "OpenAI: `/v1/responses`; `/v1/responses/input_tokens` has some of these fields": openai_rows.RESPONSES,
    "OpenAI: `/v1/batches`": openai_rows.BATCHES,
    "Anthropic: `/v1/messages`; `/v1/messages/count_tokens` has some of these fields": test_anthropic.ROWS,
    "Ollama: `/api/chat` and `/api/generate`": {**test_ollama.CHAT, **test_ollama.GENERATE},
    "Ollama: `options`": test_ollama.OPTIONS,
    "Ollama: `/api/embed` and `/api/embeddings`": {**test_ollama.EMBED, **test_ollama.EMBEDDINGS},
}


def test_the_page_has_the_tables(pytestconfig: pytest.Config) -> None:
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "docs/api.md lacks the marks around the tables"
    tables = "\n".join(f"### {title}\n\n{table(rows)}\n" for title, rows in TABLES.items())
    page = f"{before}{BEGIN}\n{tables}\n{END}{after}"
    if pytestconfig.getoption("--update-golden"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run this test with --update-golden"
