"""What the operator asked `agentguard tui` for; validated in the command, passed to the model and to the screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agentguard.errors import ConfigError

DEFAULT_GATEWAY = "http://127.0.0.1:8484"


@dataclass(frozen=True, slots=True)
class Options:
    """``gateways`` and ``metrics``: URLs; ``interval_s``: between samples; ``record``, ``replay``: files; ``demo``: a scenario of
    the simulator; ``content``: show live tails of traces. Without any source the default gateway is watched. Raises ConfigError for
    a URL that cannot be watched (see `server_url`)."""

    gateways: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    api_key: str | None = None
    operator_key: str | None = None
    """For actions, where the gateway has a key of its own for them."""
    interval_s: float = 1.0
    window_s: float = 60.0
    record: Path | None = None
    replay: Path | None = None
    speed: float = 1.0
    demo: str | None = None
    seed: int = 0
    once: bool = False
    as_json: bool = False
    mini: bool = False
    web: bool = False
    port: int = 8485
    readonly: bool = False
    ascii: bool = False
    theme: str | None = None
    content: bool = False

    def __post_init__(self) -> None:
        for field, urls in (("gateway", self.gateways), ("metrics", self.metrics)):
            for url in urls:
                server_url(field, url)


def server_url(field: str, text: str) -> str:
    """The address of a server, without a path of its API. Raises ConfigError for what is none, and for one that holds a secret:
    addresses are shown, recorded and exported. The message does not repeat it."""
    shown = ("…@" if "@" in text else "") + text.rpartition("@")[2].partition("?")[0].partition("#")[0]
    try:
        parts = urlsplit(text)
        port, host, user = parts.port, parts.hostname, parts.username
    except ValueError as error:  # a port above 65535, a bracket that is not closed
        raise ConfigError(field, shown, f"is no URL ({error if '@' not in text else 'see RFC 3986'}); {_SUCH}") from None
    if "@" in parts.netloc or user:
        raise ConfigError(field, shown, f"an address is shown and recorded, so it takes no user or password; {_KEYS[field]}")
    if parts.query or parts.fragment or "@" in text:
        raise ConfigError(field, shown, f"an address is shown and recorded, so it ends before ?, # and @; {_KEYS[field]}")
    if parts.scheme not in ("http", "https") or not host or port == 0 or not text.isprintable() or " " in text:
        raise ConfigError(field, shown, _SUCH)
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError(field, shown, f"has no host name that can be looked up; {_SUCH}") from None
    return text.rstrip("/").removesuffix("/v1")


_SUCH = "give a URL such as http://127.0.0.1:8484"
_KEYS = {
    "gateway": "put the key into AGENTGUARD_API_KEY, and an operator's into AGENTGUARD_OPERATOR_KEY",
    "metrics": "vLLM's /metrics needs no key (one for a gateway goes into AGENTGUARD_API_KEY)",
}
