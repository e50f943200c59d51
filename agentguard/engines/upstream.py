"""Is this a URL of an engine? What an operator may write for an upstream, checked before anything is sent there."""

from __future__ import annotations

from urllib.parse import urlsplit

from agentguard.errors import ConfigError


def check_url(field: str, url: str) -> str:
    """The URL without a slash at its end. Raises ConfigError for another scheme, a password, a query, and what two parsers could
    read in two ways."""
    remedy = "give a URL such as http://127.0.0.1:8000, without a password, query or fragment; keys go in their own option"
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        fine = fine and not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        fine = False
    if not fine or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ConfigError(field, url.rpartition("@")[2], remedy)
    return url.rstrip("/")
