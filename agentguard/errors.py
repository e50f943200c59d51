"""Every error agentguard raises on purpose.

    AgentGuardError
    ├── ConfigError        a recipe, knob, flag or header is wrong: names the field, the value and the remedy
    │   ├── TooLargeError       more bytes than agentguard.limits allows
    │   ├── TooSlowError        a request whose body did not arrive in time
    │   └── ContextLengthError  the prompt leaves no room for an answer in the context window
    ├── StepTimeoutError   a step did not end in the time its caller gave it
    ├── StreamClosedError  a stream was read after its end, or closed while it was read
    ├── SessionLimitError  a session has used up what its recipe allows; an operator may raise the limit
    ├── SessionBusyError   its running steps hold what is left
    ├── BusyError          the gateway or a caller has too much running; says when to come again
    ├── ActionRefusedError an operator's action that this monitor does not take, or that found nothing to act on
    ├── EngineError        the engine did something we cannot work around
    │   ├── EngineStartError    it never became ready
    │   ├── EngineDiedError     it was ready and is gone
    │   │   └── OtherModelError     another model answers at its address
    │   └── EngineRequestError  it refused one request; carries the HTTP status
    └── PluginError        the plugin cannot run on this vLLM, with the reason

The message of each says which field, which value, and what to do about it. `exit_code` is the CLI's exit status (2 = usage or
configuration, 3 = retryable, 1 = anything else).
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

from agentguard.limits import SHOWN_CHARACTERS


class AgentGuardError(Exception):
    """The root of the tree. ``exit_code`` is the command line's exit status; ``retry_after`` says when the same may work, in the
    words of the server's header of that name (seconds or a date), None where no server has said so."""

    exit_code = 1
    retry_after: str | None = None


class ConfigError(AgentGuardError, ValueError):
    """A value somebody wrote is wrong. Also a ValueError, so that vLLM's front end answers HTTP 400."""

    exit_code = 2
    status = 400

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{shown(field)}={_SHORT.repr(value)}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class TooLargeError(ConfigError):
    """More bytes than `agentguard.limits` allows."""

    status = 413


class TooSlowError(ConfigError):
    """The body did not arrive in time; sending it again may do."""

    status = 408


class ContextLengthError(ConfigError):
    """``prompt`` (None where nobody has told it) and ``window`` in tokens; ``room`` is what is left for an answer."""

    code = "context_length_exceeded"

    def __init__(self, prompt: int | None, window: int, room: int = 0) -> None:
        value = "too long" if prompt is None else f"{prompt} tokens"
        left = "" if prompt is None else f" ({room} are left, too few for an answer)"
        super().__init__("messages", value, f"the prompt fills the context window of {window} tokens{left}; compact it")


class SessionLimitError(AgentGuardError):
    """A session has used what it may; it goes on once its limit is raised. HTTP 429.

    ``meter``: "steps", "tokens" or "no_progress", which stands at ``value`` of ``limit``.
    """

    code = "session_limit"
    field = "session"

    def __init__(self, session: str, meter: str, value: int, limit: int) -> None:
        super().__init__(
            f"session {session!r} is stopped: {meter} is {value} of {limit}; start a new session, or raise the limit with "
            f"POST /agentguard/sessions/limit"
        )


class StepTimeoutError(AgentGuardError, TimeoutError):
    """``seconds`` is what the caller gave. The step was ended in the engine, and counts as cancelled."""

    exit_code = 3

    def __init__(self, session: str, seconds: float) -> None:
        super().__init__(
            f"a step of session {session!r} did not end within {seconds:g} s (timeout_s); give it more time, or less to think "
            f"(think_tokens)"
        )
        self.seconds = seconds


class StreamClosedError(AgentGuardError):
    """Programming error of a stream's reader."""


class SessionBusyError(AgentGuardError):
    """The session's running steps hold what its limit leaves; one of them has to end first."""

    code = "session_busy"
    field = "session"

    def __init__(self, session: str, value: int, limit: int) -> None:
        super().__init__(
            f"session {session!r} has used {value} of {limit} tokens and its running steps hold the rest; send this again when "
            f"one has ended, or give max_tokens, which leaves room for others"
        )


class BusyError(AgentGuardError):
    """``status``: 429 where the caller itself is the reason, 503 where the gateway is."""

    exit_code = 3

    def __init__(self, status: int, code: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.field = "caller"


class ActionRefusedError(AgentGuardError):
    """An operator's action that is not taken here, or that found nothing to act on."""


class EngineError(AgentGuardError):
    """The engine did something that cannot be worked around: it did not answer in time, or what it said cannot be read.
    HTTP 502."""


class EngineStartError(EngineError):
    """An engine never became ready; the message holds the end of its log."""


class EngineDiedError(EngineError):
    """The engine, or a gateway in front of it, was there and is gone, or nobody answers at its
    address. HTTP 503; the same may work later."""

    exit_code = 3


class OtherModelError(EngineDiedError):
    """``model`` answers where ``expected`` was served: for whoever asks for that one, the engine is gone."""

    def __init__(self, engine: str, model: str, expected: str) -> None:
        super().__init__(engine, model, expected)
        self.engine, self.model, self.expected = engine, shown(model), expected

    def __str__(self) -> str:
        return (
            f"engine {self.engine} serves {self.model!r} now, and this gateway {self.expected!r}; start that again there, or the "
            f"gateway anew"
        )


class EngineRequestError(EngineError):
    """The engine refused one request. ``status`` is the HTTP status, ``field`` what it says is wrong, "engine" where it says
    nothing of the kind."""

    def __init__(self, status: int, message: str, retry_after: str | None = None, field: str = "engine") -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.field = field


class PluginError(AgentGuardError):
    """The plugin cannot run on this vLLM; the message says which name or version is the reason."""


def loggable(error: Exception) -> str:
    """An error as a log may hold it: without what a server, or a check of a request, quotes of the request.

    Of an error that is no agentguard's: its type, and the file and line that raised it.
    """
    if isinstance(error, EngineRequestError):
        return f"the engine answered {error.status}"
    if isinstance(error, ConfigError):
        return f"{error.field} is refused"
    if isinstance(error, AgentGuardError):
        return str(error)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error).__name__ + (f" at {at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else "")


def shown(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """Its beginning, where it is long: a message must not carry a whole request."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def _short() -> reprlib.Repr:
    """`repr` that looks at a bounded part of a value: a few YAML aliases are a list of 10^9 items, and a body may be megabytes."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = SHOWN_CHARACTERS
    short.maxlevel, short.maxdict, short.maxlist, short.maxtuple = 3, 4, 4, 4
    return short


_SHORT = _short()


def nearest(word: str, choices: Iterable[str]) -> str:
    """The hint at the end of an unknown-name message: the closest choice, and all of them."""
    names = sorted(choices)
    word = shown(str(word))  # a key of a YAML mapping may be a number, or nothing
    close = difflib.get_close_matches(word, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + ", ".join(names)
