"""The agents `agentguard wrap` knows: what each needs to ask our proxy. Pure: environment and files are computed, not written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KEY = "AGENTGUARD_PROXY_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """What agents are pointed at: the proxy's URL without /v1, its key, the model, its window in tokens (0: unknown)."""

    url: str
    key: str = field(repr=False)
    model: str = ""
    window: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """env: variables to set (None: to remove); files: their text by path below a temporary folder; arguments: put in front of the
    user's own."""

    env: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """``command``: the program's name; ``tried``: the version it was tested with; ``setup``: (target, temporary folder, the user's
    arguments) to a Setup; None for an agent that can only be configured."""

    command: str
    name: str
    protocol: str
    tried: str
    setup: Callable[[Target, Path, Sequence[str]], Setup] | None
    note: str = ""

    @property
    def installed(self) -> bool:
        return shutil.which(self.command) is not None


def sdk(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    """Any program that uses the OpenAI or the Anthropic SDK."""
    return Setup(
        {
            "OPENAI_BASE_URL": f"{target.url}/v1",
            "OPENAI_API_BASE": f"{target.url}/v1",
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_API_KEY": target.key,
            "ANTHROPIC_AUTH_TOKEN": None,
            "ANTHROPIC_MODEL": target.model,
        }
    )


def _claude(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    others = ["ANTHROPIC_SMALL_FAST_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS"))]
    env: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": None,
        "ANTHROPIC_MODEL": target.model,
        **dict.fromkeys(others, target.model),
        # with one of these it would not ask the server above
        **dict.fromkeys(
            ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_OAUTH_TOKEN")
        ),
        "ANTHROPIC_CUSTOM_HEADERS": None,
        "CLAUDE_CONFIG_DIR": str(home),  # the user's own settings may name another server
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.window and "CLAUDE_CODE_MAX_OUTPUT_TOKENS" not in os.environ:
        # it asks for 32,000 tokens of answer whatever the window is (anthropics/claude-code#47702)
        env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(max(1024, min(32_000, target.window // 4)))
    return Setup(env, {".claude.json": json.dumps({"hasCompletedOnboarding": True})})


def _codex(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    lines = [
        f"model = {json.dumps(target.model)}",
        'model_provider = "agentguard"',
        *([f"model_context_window = {target.window}"] if target.window else []),
        "[model_providers.agentguard]",
        'name = "agentguard"',
        f"base_url = {json.dumps(target.url + '/v1')}",
        'wire_api = "responses"',
        f'env_key = "{KEY}"',
    ]
    return Setup({"CODEX_HOME": str(home), KEY: target.key}, {"config.toml": "\n".join(lines) + "\n"})


def _opencode(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    model: dict[str, object] = {"name": target.model, "reasoning": True, "tool_call": True}
    if target.window:
        model["limit"] = {"context": target.window, "output": max(1024, target.window // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{KEY}}}"},
        "models": {target.model: model},
    }
    own = {"model": f"agentguard/{target.model}", "small_model": f"agentguard/{target.model}", "provider": {"agentguard": provider}}
    env: dict[str, str | None] = {
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "XDG_CONFIG_HOME": str(home / "config"),  # it writes a schema's address into the user's own file
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_STATE_HOME": str(home / "state"),
        KEY: target.key,
    }
    return Setup(env, {"opencode.json": json.dumps(own, indent=1)})


def _qwen(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    env: dict[str, str | None] = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
        "QWEN_TELEMETRY_ENABLED": "false",
    }
    return Setup(env, arguments=() if "--auth-type" in arguments else ("--auth-type", "openai"))


def _aider(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    env: dict[str, str | None] = {
        "OPENAI_API_BASE": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "AIDER_MODEL": f"openai/{target.model}",
        "AIDER_WEAK_MODEL": f"openai/{target.model}",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_ANALYTICS": "false",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Setup(env)


def _mini(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    env: dict[str, str | None] = {
        "OPENAI_API_BASE": f"{target.url}/v1",
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "MSWEA_MODEL_NAME": f"openai/{target.model}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Setup(env)


AGENTS = (
    Agent("claude", "Claude Code", "messages", "2.1.197", _claude),
    Agent("codex", "Codex", "responses", "0.171.0", _codex),
    Agent("opencode", "opencode", "chat", "1.18.33", _opencode),
    Agent("qwen", "qwen-code", "chat", "0.15.10", _qwen),
    Agent("aider", "aider", "chat", "", _aider),
    Agent("mini", "mini-swe-agent", "chat", "2.4.6", _mini),
    Agent("openhands", "OpenHands", "chat", "", None, "Python 3.12; not run here"),
)


def setup_for(command: str, target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    """The known agent's set-up, else that of any SDK program. OpenHands takes its variables from the environment too."""
    name = Path(command).name
    for agent in AGENTS:
        if agent.command == name and agent.setup is not None:
            return agent.setup(target, home, arguments)
    if name == "openhands":
        env: dict[str, str | None] = {
            "LLM_MODEL": f"openai/{target.model}", "LLM_BASE_URL": f"{target.url}/v1", "LLM_API_KEY": target.key,
        }  # fmt: skip
        return Setup(env)
    return sdk(target, home, arguments)
