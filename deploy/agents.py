"""Coding agents, and the settings with which each of them uses a model of a running server.

An agent reads its settings from its arguments, from environment variables, or from a file that an argument names by its path or by a folder
above it. None of these changes the user's own settings. Arguments never contain the API key, because other users of the machine can see
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deploy.settings import KEY_VARIABLE

NAME = "relaxserve"  # name of the provider, for agents that give each provider a name
NO_KEY = "unused"  # most agents demand a key, and a server without keys accepts any
ANSWER = 8192  # most tokens of an answer, for agents whose settings have such a limit; a quarter of the context if that is less
# Time without an event after which Codex and Claude Code send a request again, in ms. Their default, 300 s, is less than a long prompt
# takes on a slow machine. The comments that the server sends to keep a connection open do not count as events.
SILENCE_MS = 1_800_000


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a running server."""

    url: str
    model: str
    context: int  # number of tokens of the longest sequence
    key: str | None = None  # API key for the server; None: the agent gets NO_KEY, or no key if the agent demands none

    @property
    def answer(self) -> int:
        """The maximum number of tokens of an answer."""
        return min(ANSWER, self.context // 4)


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments, environment variables and file with which an agent uses the model of a server."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    file: str = ""  # content of the settings file; "": there is none
    file_name: str = ""  # path of the settings file below the folder in which `relaxserve launch` writes such files
    named: str = ""  # value of the last of `arguments`, as a path below that folder: the file, or a folder above it


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent, and the function that returns its settings for a served model."""

    name: str
    program: str  # name of the executable, looked up in PATH
    package: str  # the command that installs the agent
    first_tokens: int  # number of tokens of the agent's instructions and tools, with which each conversation begins
    settings: Callable[[Served], Settings]


def _codex(served: Served) -> Settings:
    provider: dict[str, object] = {
        "name": NAME,
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "stream_idle_timeout_ms": SILENCE_MS,
    }
    if served.key is not None:
        provider["env_key"] = KEY_VARIABLE
    values = {f"model_providers.{NAME}.{name}": value for name, value in provider.items()}
    values |= {"model_provider": NAME, "model": served.model, "model_context_window": served.context}
    arguments = tuple(part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}"))
    return Settings(arguments, {} if served.key is None else {KEY_VARIABLE: served.key})


def _claude(served: Served) -> Settings:
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or NO_KEY,
        "ANTHROPIC_MODEL": served.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": served.model,  # the model for titles and summaries
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),  # Claude Code assumes 200,000 for models that it does not know
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.answer),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(SILENCE_MS),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Settings((), environment)


def _aider(served: Served) -> Settings:
    limits = {"max_input_tokens": served.context, "max_output_tokens": served.answer, "litellm_provider": "openai", "mode": "chat"}
    environment = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.key or NO_KEY}
    arguments = ("--model", f"openai/{served.model}", "--model-metadata-file")
    return Settings(arguments, environment, json.dumps({f"openai/{served.model}": limits}, indent=2), "aider.json", "aider.json")


def _opencode(served: Served) -> Settings:
    limit = {"context": served.context, "output": served.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": {"baseURL": f"{served.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    config = {"provider": {NAME: provider}, "model": f"{NAME}/{served.model}", "small_model": f"{NAME}/{served.model}"}
    return Settings((), {"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY_VARIABLE: served.key or NO_KEY})


def _continue(served: Served) -> Settings:
    model = {
        "name": served.model,
        "provider": "openai",
        "model": served.model,
        "apiBase": f"{served.url}/v1",
        "apiKey": served.key or NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": served.context, "maxTokens": served.answer},
    }
    config = {"name": NAME, "version": "1.0.0", "schema": "v1", "models": [model]}
    return Settings(("--config",), {}, json.dumps(config, indent=2), "continue.yaml", "continue.yaml")  # JSON is YAML


def _cline(served: Served) -> Settings:
    provider = "openai-compatible"
    values = {"provider": provider, "apiKey": served.key or NO_KEY, "model": served.model, "baseUrl": f"{served.url}/v1"}
    entry = {"settings": values, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    config = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: entry}}
    arguments = ("--provider", provider, "--model", served.model, "--data-dir")
    return Settings(arguments, {}, json.dumps(config, indent=2), "cline/settings/providers.json", "cline")


def _qwen(served: Served) -> Settings:
    environment = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": served.key or NO_KEY, "OPENAI_MODEL": served.model}
    return Settings(("--auth-type", "openai"), environment)


AGENTS = {
    agent.name: agent
    for agent in (
        Agent("codex", "codex", "npm install -g @openai/codex", 6_000, _codex),
        Agent("claude", "claude", "npm install -g @anthropic-ai/claude-code", 19_000, _claude),
        Agent("aider", "aider", "pip install aider-chat", 1_000, _aider),
        Agent("opencode", "opencode", "npm install -g opencode-ai", 7_000, _opencode),
        Agent("cline", "cline", "npm install -g cline", 5_000, _cline),
        Agent("continue", "cn", "npm install -g @continuedev/cli", 2_000, _continue),
        Agent("qwen", "qwen", "npm install -g @qwen-code/qwen-code", 18_000, _qwen),
    )
}
