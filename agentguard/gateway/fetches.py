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


def check_fetches(body: Mapping[str, Any], hosts: Collection[str]) -> None:
    """Raises ConfigError naming the field. ``hosts``: from which media may be fetched, over https."""
    for field in REFUSED:
        if body.get(field) is not None:
            raise ConfigError(field, "…", "is the engine's own; leave it out")
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and isinstance(message.get("content"), dict | list):
            for field, url in _urls(message["content"], f"messages.{number}.content"):
                _check(field, url, hosts)


def _urls(content: Any, where: str) -> Iterator[tuple[str, str]]:
    """vLLM takes `image_url`, `audio_url`, `video_url` and others like them, as text or as an object with `url`, and looks at the
    keys whatever the part's type says. So every text below such a key counts, however deep it lies."""
    todo: list[tuple[str, Any, bool]] = [(where, content, False)]
    while todo:
        field, held, fetched = todo.pop()
        if isinstance(held, dict):
            for name, inner in held.items():
                media = name.endswith("url") or name in _MEDIA
                todo.append((f"{field}.{name}", inner, media or (fetched and name not in _BESIDE)))
        elif isinstance(held, list):
            todo += [(f"{field}.{place}", inner, fetched) for place, inner in enumerate(held)]
        elif isinstance(held, str) and fetched:
            yield field, held


_MEDIA = ("file", "image", "video", "audio")
_BESIDE = ("detail", "format", "media_type", "type", "text", "data", "file_data", "filename", "file_id", "id", "name", "uuid")
"""What stands in such an object beside the URL."""


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
