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
    user's own; mirrors: folders below the temporary one that show what a folder of the user's holds, but for the names given."""

    env: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    mirrors: dict[str, tuple[Path, tuple[str, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    """``command``: the program's name; ``tried``: the version it was tested with; ``setup``: (target, temporary folder, the user's
    arguments) to a Setup; ``also``: other names, of the program or of its package."""

    command: str
    name: str
    protocol: str
    tried: str
    setup: Callable[[Target, Path, Sequence[str]], Setup]
    note: str = ""
    also: tuple[str, ...] = ()

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
    # it writes a schema's address into the user's own file; what its tools look for in these folders they find all the same
    own_folders = {"XDG_CONFIG_HOME": ("config", ".config"), "XDG_DATA_HOME": ("data", ".local/share")}
    own_folders |= {"XDG_STATE_HOME": ("state", ".local/state")}
    env: dict[str, str | None] = {
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        **{name: str(home / folder) for name, (folder, _) in own_folders.items()},
        KEY: target.key,
    }
    mirrors: dict[str, tuple[Path, tuple[str, ...]]] = {
        folder: (Path(os.environ.get(name) or Path.home() / usual), ("opencode",)) for name, (folder, usual) in own_folders.items()
    }
    return Setup(env, {"opencode.json": json.dumps(own, indent=1)}, mirrors=mirrors)


def _qwen(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    env: dict[str, str | None] = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
        "QWEN_TELEMETRY_ENABLED": "false",
    }
    told = any(argument.partition("=")[0] == "--auth-type" for argument in arguments)
    return Setup(env, arguments=() if told else ("--auth-type", "openai"))


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


def _openhands(target: Target, home: Path, arguments: Sequence[str]) -> Setup:
    return Setup({"LLM_MODEL": f"openai/{target.model}", "LLM_BASE_URL": f"{target.url}/v1", "LLM_API_KEY": target.key})


AGENTS = (
    Agent("claude", "Claude Code", "messages", "2.1.197", _claude, also=("@anthropic-ai/claude-code",)),
    Agent("codex", "Codex", "responses", "0.171.0", _codex, also=("@openai/codex",)),
    Agent("opencode", "opencode", "chat", "1.18.33", _opencode, also=("opencode-ai",)),
    Agent("qwen", "qwen-code", "chat", "0.15.10", _qwen, also=("@qwen-code/qwen-code", "qwen-code")),
    Agent("aider", "aider", "chat", "", _aider, also=("aider-chat",)),
    Agent("mini", "mini-swe-agent", "chat", "2.4.6", _mini, also=("mini-swe-agent",)),
    Agent("openhands", "OpenHands", "chat", "", _openhands, "Python 3.12; not run here"),
)
LAUNCHERS = ("npx", "bunx", "uvx", "env", "nice", "time", "timeout")
"""Programs that run the one named behind their own options."""


def recognise(command: Sequence[str]) -> tuple[Agent | None, int]:
    """The agent a command runs (None: none that is known), and the place of the word that names it.

    `npx -y @openai/codex@0.171 exec …` is Codex, at place 2.
    """
    place = 0
    if Path(command[0]).name in LAUNCHERS:
        own = (p for p, word in enumerate(command) if p and not _of_a_launcher(word))
        place = next(own, 0)
    word = command[place]
    name = word if word.startswith("@") else Path(word).name
    bare = name[:1] + name[1:].partition("@")[0]
    agent = next((a for a in AGENTS if bare == a.command or bare in a.also), None)
    return agent, 0 if agent is None else place


def _of_a_launcher(word: str) -> bool:
    """An option of its own, a variable it sets, a number of seconds."""
    return word.startswith("-") or "=" in word or word[:1].isdigit()


def setup_for(command: Sequence[str], target: Target, home: Path) -> Setup:
    """The known agent's set-up, else that of any SDK program."""
    agent, place = recognise(command)
    return (agent.setup if agent is not None else sdk)(target, home, command[place + 1 :])
