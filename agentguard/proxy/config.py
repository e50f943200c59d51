"""What LiteLLM is told, and the key its callers need."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import yaml

from agentguard.dirs import state_dir
from agentguard.errors import ConfigError

MASTER_KEY, GATEWAY_KEY = "LITELLM_MASTER_KEY", "AGENTGUARD_API_KEY"
"""Environment variables; keys stand in no file of the configuration and on no command line."""
HOOK = "agentguard.integrations.litellm.hook"
MIN_KEY = 32
_ABOUT = """\
# LiteLLM in front of the guard's gateway. For a proxy of your own: take over 'callbacks' and the entries of model_list, and put
# agentguard where LiteLLM's Python finds it (pip install --no-deps agentguard-vllm). LiteLLM 1.82.7, 1.82.8 and 1.107.* are
# compromised releases: use 1.106.12.
"""


def config(model: str, gateway: str, *, keyed: bool) -> dict[str, Any]:
    """LiteLLM's configuration. ``gateway``: its URL without /v1; ``keyed``: it wants a key, which the environment holds."""
    served = {
        "model": f"hosted_vllm/{model}",
        "api_base": f"{gateway.rstrip('/')}/v1",
        "api_key": f"os.environ/{GATEWAY_KEY}" if keyed else "none",
        # /v1/responses becomes chat completions too, the one protocol the guard reads
        "use_chat_completions_api": True,
        "max_retries": 0,
    }
    return {
        # agents ask for a second, small model by names of their own; there is one
        "model_list": [{"model_name": name, "litellm_params": served.copy()} for name in (model, "*")],
        "litellm_settings": {"callbacks": HOOK, "num_retries": 0, "telemetry": False},
        # one refused request would put the only deployment aside, and everybody would get 429
        "router_settings": {"disable_cooldowns": True, "num_retries": 0},
        "general_settings": {
            "master_key": f"os.environ/{MASTER_KEY}",
            "forward_client_headers_to_llm_api": True,
            "missing_session_id": "omit",
            "cancel_on_disconnect": True,
            "disable_spend_logs": True,
        },
    }


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(settings: dict[str, Any]) -> str:
    return _ABOUT + yaml.dump(settings, Dumper=_NoAliases, sort_keys=False, width=120)


def environment(master_key: str, gateway_key: str | None, home: Path, importable: Path) -> dict[str, str]:
    """What LiteLLM's process sees: no credentials and settings of the shell, which it would act on (a DATABASE_URL, a provider's
    key). ``importable``: a folder that holds the package agentguard and nothing else."""
    kept = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
    env = {k: os.environ[k] for k in kept if k in os.environ}
    env |= {
        "HOME": str(home),
        "PYTHONPATH": str(importable),
        "PYTHONDONTWRITEBYTECODE": "1",
        MASTER_KEY: master_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_TELEMETRY": "False",
        "DISABLE_ADMIN_UI": "True",
        "NO_DOCS": "True",
        "NO_REDOC": "True",
        "LITELLM_LOG": "ERROR",
        "NO_PROXY": "127.0.0.1,localhost,::1",
    }
    return env | ({GATEWAY_KEY: gateway_key} if gateway_key else {})


def key_file() -> Path:
    return state_dir() / "proxy-key"


def master_key() -> str:
    """This installation's key, made on first use; only its owner can read the file."""
    path = key_file()
    if not path.exists():
        descriptor, aside = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(f"sk-{secrets.token_hex(32)}\n")
        with contextlib.suppress(FileExistsError):  # whoever links first is right, and nobody reads half a key
            os.link(aside, path)
        Path(aside).unlink()
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
    key = path.read_text().strip()
    if len(key) < MIN_KEY:  # not finished by whoever began it, or written by hand
        raise ConfigError("proxy key", f"{len(key)} characters in {path}", f"needs {MIN_KEY}; remove the file to get a new one")
    return key


def check_address(host: str, key: str | None, *, allow_public: bool) -> None:
    """Raises ConfigError for an address others can reach, unless that was asked for and comes with a key of the operator's own."""
    if host in ("127.0.0.1", "localhost", "::1"):
        return
    if not allow_public:
        raise ConfigError("host", host, "can be reached from outside; add --allow-public if that is meant, or bind to 127.0.0.1")
    if not key:
        raise ConfigError("host", host, "can be reached from outside; set AGENTGUARD_PROXY_KEY to a key of at least 32 characters")
    if len(key) < MIN_KEY:
        raise ConfigError(
            "AGENTGUARD_PROXY_KEY", f"{len(key)} characters", f"too short for an open address; use at least {MIN_KEY}"
        )
