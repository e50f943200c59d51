"""Whose session is this? The first id a request carries, in LiteLLM's order (litellm.md, section 2.4), or a guess from its prompt.

Standard library only: the gateway and the hook inside LiteLLM's environment read requests with the same functions.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentguard.errors import ConfigError

SESSION, CALLER, AGENT = "x-agentguard-session", "x-agentguard-caller", "x-agentguard-agent"
"""What our hook tells the gateway: the session's id, a hash of the key its own caller gave, and which of its agents this is."""
FIRST = (SESSION, "x-litellm-trace-id", "x-litellm-session-id")
LAST = ("session-id", "session_id", "thread-id", "conversation_id", "x-session-id")
PARENT = "x-parent-session-id"
GUESSED = "h-"
IDLE_S = 1800.0
RETRY_S = 60.0
_VENDOR = re.compile(r"x-[a-z0-9-]+-session-id")
_GUESS = re.compile(GUESSED + r"[0-9a-f]{16}(\.\d+)?")
_SAFE = re.compile(r"[\x21-\x7e]{1,256}")
_VOLATILE = re.compile(
    r"<system-reminder>.*?(?:</system-reminder>|\Z)|x-anthropic-billing-header:[^\n]*"
    r"|\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?[\w.+:-]{0,20})?"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},? [^\n]{0,40}?\d{4}|\d{1,2}/\d{1,2}/\d{4}",
    re.DOTALL,
)
"""What changes between two prompts of one session: reminders, client versions, dates."""


_READ = 32_768
"""Characters of a text that are looked at; a prompt may be megabytes long, and this runs on the gateway's loop."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who runs the session: ids come from clients, so a caller is always part of the key. ``agent`` is the one of the session's
    agents that asks, "" for its main one; they share an account, and each has a context window of its own."""

    caller: str
    session: str
    agent: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.caller}/{self.session}" if self.caller else self.session

    @property
    def guessed(self) -> bool:
        """Recognised by its prompt alone, so two like tasks may be taken for one: its limits warn and never stop it."""
        return _GUESS.fullmatch(self.session) is not None


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity:
    """The caller is a hash of its key, so that one client's ids cannot drain another's budget.

    A proxy that calls for many tells their hashes apart in `CALLER`; that only divides what belongs to the proxy's own key.
    Raises ConfigError for an id that is empty, too long or not printable ASCII.
    """
    lower = {k.lower(): v for k, v in headers.items()}
    caller = digest(lower.get("authorization", ""), lower.get(CALLER, ""))
    session, agent = session_of(lower, body)
    if session is None:
        session = guess(body, caller) or f"anonymous-{uuid.uuid4().hex[:12]}"
    return Identity(caller, session, agent)


def digest(*parts: str) -> str:
    """Short, for ids and logs; "" when there is nothing to hide."""
    if not any(parts):
        return ""
    return hashlib.sha256("\0".join(part for part in parts if part).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str | None, str]:
    """The id that a request carries (None: none) and the agent's within the session. ``headers`` have lower-case names.

    Raises ConfigError naming the header or field of a strange id.
    """
    # somebody's header that is no id is somebody's own affair; LiteLLM passes over it too
    vendors = sorted(
        n for n in headers if _VENDOR.fullmatch(n) and n not in (*FIRST, *LAST, PARENT) and _SAFE.fullmatch(headers[n])
    )
    found = next((name for name in (*FIRST, *vendors, *LAST) if name in headers), None)
    name, value = (found, headers[found]) if found is not None else _in_body(headers, body)
    if name is None:
        return None, ""
    session = _checked(name, value)
    if AGENT in headers:
        return session, _checked(AGENT, headers[AGENT])
    if PARENT in headers:  # opencode gives a subagent's session an id of its own
        return _checked(PARENT, headers[PARENT]), session
    agent = headers.get("x-claude-code-agent-id", "")
    return session, _checked("x-claude-code-agent-id", agent) if agent else ""


def _in_body(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str | None, Any]:
    for key in ("metadata", "litellm_metadata"):
        metadata = body.get(key)
        if not isinstance(metadata, dict):
            continue
        if metadata.get("session_id") is not None:
            return f"{key}.session_id", metadata["session_id"]
        user = _user_session(metadata.get("user_id"))
        if user is not None:
            return f"{key}.user_id", user
    for item in headers.get("baggage", "").split(","):
        key, _, value = item.partition("=")
        if key.strip() == "session.id" and value.strip():
            return "baggage", value.partition(";")[0].strip()
    return None, None


def _user_session(user: Any) -> str | None:
    """Anthropic clients hide it in `metadata.user_id`: an object, its JSON text (Claude Code), or a string that ends with
    `_session_<id>`."""
    if isinstance(user, str) and user.startswith("{"):
        try:
            user = json.loads(user)
        except ValueError:
            return None
    if isinstance(user, dict):
        session = user.get("session_id")
        return session if isinstance(session, str) and session else None
    if isinstance(user, str) and "_session_" in user:
        return user.rpartition("_session_")[2] or None
    return None


def _checked(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _SAFE.fullmatch(value):
        raise ConfigError(name, value, "a session id is 1 to 256 printable ASCII characters without spaces")
    return value


def guess(body: Mapping[str, Any], caller: str) -> str | None:
    """An id from what stays the same in a session: model, first instruction and first question. None without a question.

    For qwen-code, aider, mini-swe-agent and plain SDKs, which send no id (litellm.md, section 4.3).
    """
    system, user = opening(body)
    if not user:
        return None
    text = "\0".join((caller, str(body.get("model") or ""), system, user))
    return GUESSED + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def opening(body: Mapping[str, Any]) -> tuple[str, str]:
    """The first instruction and the first question of a chat, messages or responses request, without what changes."""
    system = _stable(body.get("system") or body.get("instructions"))
    user = ""
    for message in messages_of(body):
        role, text = message.get("role"), _stable(message.get("content"))
        if role in ("system", "developer"):
            system = system or text
        elif role == "user" and text:
            user = text
            break
    return system, user


def messages_of(body: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    asked = body.get("messages")
    if asked is None:
        asked = body.get("input")
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    return [m for m in asked if isinstance(m, dict)] if isinstance(asked, list) else []


def _stable(content: Any) -> str:
    if isinstance(content, list):
        content = "\n".join(str(p.get("text") or "") for p in content if isinstance(p, dict))
    return _VOLATILE.sub("", content[:_READ]).strip() if isinstance(content, str) else ""


class Guesses:
    """Which run of a task a guessed id means. The same task started again is a new session: a request without a turn of the model's
    and no longer than the run's first begins one (an agent may leave a useless turn out and complain), and so does the first after
    half an hour of silence. The very same request again within a minute of one that was refused is a retry of the run's first, not
    a new run: what is remembered of a prompt that did not fit must be found. Bounded; the least recently used is forgotten.

    ``told`` and ``learn`` carry what is known of a guess to another gateway, or to the next one on this port."""

    def __init__(self, limit: int = 10_000, clock: Callable[[], float] = time.time) -> None:
        self._limit = limit
        self._clock = clock
        self._runs: OrderedDict[Identity, tuple[int, float, int, str, bool]] = OrderedDict()

    def told(self, identity: Identity) -> str:
        """What is known of the guess, as text; "" for nothing."""
        return json.dumps(self._runs[identity]) if identity in self._runs else ""

    def learn(self, identity: Identity, text: str) -> None:
        """Take over what another one told. Text that cannot be read is passed over: a guess may be forgotten."""
        try:
            run, seen, first, mark, refused = json.loads(text)
            self._runs[identity] = (int(run), float(seen), int(first), str(mark), bool(refused))
        except (ValueError, TypeError):
            return

    def place(self, identity: Identity, body: Mapping[str, Any]) -> Identity:
        """The identity with the run's number; one that was not guessed as it is."""
        if not identity.guessed:
            return identity
        now = self._clock()
        run, seen, first, latest, refused = self._runs.pop(identity, (0, now, 0, "", False))
        messages = list(messages_of(body))
        mark = digest(str(len(messages)), *(_stable(m.get("content")) for m in (*messages[:1], *messages[-1:])))
        turns = any(m.get("role") == "assistant" or m.get("type") in _TURNS for m in messages)
        again = refused and mark == latest and now - seen <= RETRY_S
        if run == 0 or (not turns and len(messages) <= first and not again) or now - seen > IDLE_S:
            run, first = run + 1, len(messages)
        self._runs[identity] = (run, now, first, mark, False)
        while len(self._runs) > self._limit:
            self._runs.popitem(last=False)
        return replace(identity, session=f"{identity.session}.{run}")

    def refused(self, identity: Identity) -> None:
        """The latest request of this identity, as `identify` gave it, got an error instead of a reply."""
        if identity in self._runs:
            self._runs[identity] = (*self._runs[identity][:4], True)


_TURNS = ("reasoning", "function_call", "function_call_output")
