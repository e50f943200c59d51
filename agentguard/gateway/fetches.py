"""What a request may make the engine fetch: nothing, unless the recipe names the host.

vLLM fetches the URLs of images, audio and video in messages from where it runs, so a client could read what only the engine's
machine can reach (SSRF). And the address of a peer for KV transfer would make it connect anywhere. `data:` URLs carry their content
and are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from agentguard.errors import ConfigError

REFUSED = ("kv_transfer_params", "ec_transfer_params")
"""Fields of vLLM's own routers, never of a client: they name hosts and ports."""
_PLAIN = ("text", "thinking", "refusal", "tool_use", "tool_result", "reasoning")


def check_fetches(body: Mapping[str, Any], hosts: Collection[str]) -> None:
    """Raises ConfigError naming the field. ``hosts``: from which media may be fetched, over https."""
    for field in REFUSED:
        if body.get(field) is not None:
            raise ConfigError(field, "…", "is the engine's own; leave it out")
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") not in _PLAIN:
                for name, url in _urls(part):
                    _check(f"messages.{number}.content.{place}.{name}", url, hosts)


def _urls(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """vLLM takes `image_url`, `audio_url`, `video_url` and others like them, as text or as an object with `url`. The type need not
    match: it looks at the keys too, so every text that begins like a URL of some scheme counts."""
    for name, value in part.items():
        held = value.get("url") if isinstance(value, Mapping) else value
        if (
            isinstance(held, str)
            and name != "text"
            and (name.endswith("_url") or name in ("url", "file", "image", "video", "audio"))
        ):
            yield name, held


def _check(field: str, url: str, hosts: Collection[str]) -> None:
    text = url.strip()
    if text[:5].lower() == "data:":
        return
    try:
        parts = urlsplit(text)
        host, plain = parts.hostname or "", parts.scheme == "https" and not parts.username and parts.port in (None, 443)
    except ValueError:
        host, plain = "", False
    # one parser's host is another's path: backslashes and control characters are where they differ
    if host in hosts and plain and text.isascii() and text.isprintable() and "\\" not in text:
        return
    remedy = "the engine fetches nothing for clients; send a data: URL, or name the host in the recipe's media_hosts (https only)"
    raise ConfigError(field, url, remedy)
