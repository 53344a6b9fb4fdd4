"""Asks a server with the AI SDK, a client in JavaScript that speaks the APIs of several vendors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.node import PACKAGES, PATIENCE_S, node

BEGIN = """
import { text } from 'node:stream/consumers';
import * as ai from 'ai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';

globalThis.AI_SDK_LOG_WARNINGS = false;
const given = JSON.parse(await text(process.stdin));
const baseURL = `${given.url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: 'unused' });
"""
GENERATE = """
const models = {
  chat: openai.chat(given.model),
  responses: openai.responses(given.model),
  compatible: createOpenAICompatible({ name: 'own', baseURL })(given.model),
  messages: createAnthropic({ baseURL, apiKey: 'unused' })(given.model),
};
const content = given.parts.map(({ type, value }) => type === 'text'
  ? { type, text: value } : { type: 'file', mediaType: type, data: Buffer.from(value, 'base64') });
const asked = { messages: [{ role: 'user', content }], temperature: 0, maxOutputTokens: given.most, maxRetries: 0 };
const said = {};
for (const api of given.apis) {
  const whole = await ai.generateText({ model: models[api], ...asked });
  const stream = ai.streamText({ model: models[api], ...asked });
  said[api] = { text: whole.text, streamed: await stream.text, tokens: whole.usage.inputTokens };
}
process.stdout.write(JSON.stringify(said));
"""
TRANSCRIBE = """
const found = await ai.transcribe({
  model: openai.transcription(given.model), audio: Buffer.from(given.audio, 'base64'),
  providerOptions: { openai: given.options }, maxRetries: 0,
});
const { text: said, segments, language, durationInSeconds } = found;
process.stdout.write(JSON.stringify({ text: said, segments, language, durationInSeconds }));
"""


def generated(folder: Path, url: str, model: str, parts: list[tuple[str, str]], apis: list[str], most: int) -> dict[str, Any]:
    """Return what each API answers, and how many tokens it counts. Each part is a pair: a media type and data in base64, or `text` and a
    text."""
    written = [{"type": kind, "value": value} for kind, value in parts]
    return _run(folder, GENERATE, {"url": url, "model": model, "parts": written, "apis": apis, "most": most})


def transcribed(folder: Path, url: str, model: str, audio: str, **options: Any) -> dict[str, Any]:
    """Return the transcript of a file in base64."""
    return _run(folder, TRANSCRIBE, {"url": url, "model": model, "audio": audio, "options": options})


def _run(folder: Path, script: str, given: dict[str, Any]) -> dict[str, Any]:
    if not (PACKAGES / "ai").exists():
        pytest.skip("needs clients in JavaScript: make .venv/clients")
    (folder / "node_modules").symlink_to(PACKAGES)
    (folder / "ask.mjs").write_text(BEGIN + script)
    done = subprocess.run(
        [node(), "ask.mjs"], cwd=folder, input=json.dumps(given).encode(), capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout)
