"""Whose session is this? The first id that a request carries, in LiteLLM's order (litellm.md, section 2.4)."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from typing import Any

from agentguard.errors import ConfigError
from agentguard.session import Identity

FIRST = ("x-agentguard-session", "x-litellm-trace-id", "x-litellm-session-id")
LAST = ("session-id", "session_id", "thread-id", "conversation_id", "x-session-id")
_VENDOR = re.compile(r"x-[a-z0-9-]+-session-id")
_SAFE = re.compile(r"[\x21-\x7e]{1,256}")


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity:
    """The caller is a hash of its key, so that one client's ids cannot drain another's budget.

    A request without any id is a session of its own. Raises ConfigError for an id that is empty, too long or not printable ASCII.
    """
    lower = {k.lower(): v for k, v in headers.items()}
    key = lower.get("authorization", "")
    caller = hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""
    vendors = sorted(name for name in lower if _VENDOR.fullmatch(name) and name not in FIRST)
    found = next((name for name in (*FIRST, *vendors, *LAST) if name in lower), None)
    if found is not None:
        value: Any = lower[found]
    else:
        metadata = body.get("metadata")
        found, value = "metadata.session_id", metadata.get("session_id") if isinstance(metadata, dict) else None
        if value is None:
            return Identity(caller, f"anonymous-{uuid.uuid4().hex[:12]}")
    if not isinstance(value, str) or not _SAFE.fullmatch(value):
        raise ConfigError(found, value, "a session id is 1 to 256 printable ASCII characters without spaces")
    return Identity(caller, value)
