"""Who may do what: keys, their scopes, and the middleware that asks for them.

A key has some of three scopes: ``use`` sends requests to the model, ``observe`` reads events, sessions, economics and metrics,
``control`` closes traces, raises limits, pins rules and reads the words of running traces. A route that is not named in `ROUTES`
needs ``control``, so a new one is closed until somebody says who may use it. Health alone is open.

Keys made by `agentguard keys add` are 256 random bits, and the file keeps their SHA-256. A slow, salted hash (scrypt) defends
passwords that people choose against guessing; nobody guesses 256 bits, and a fast hash costs a request 1 µs. The id in front of the
secret finds the one hash that is compared, in constant time; an id nobody has is compared with a dummy. Keys given by flag stand in
no file of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from starlette.responses import JSONResponse

from agentguard.dirs import state_dir
from agentguard.errors import ConfigError, nearest
from agentguard.limits import MAX_KEY_CHARACTERS, MAX_KEYS

logger = logging.getLogger(__name__)
Scope: TypeAlias = Literal["use", "observe", "control"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
ALL = frozenset(SCOPES)
OPEN = frozenset({"/health", "/health/live", "/health/ready", "/livez", "/readyz"})
"""Need no key: whether the gateway lives, and nothing about what it does."""
ROUTES: Mapping[str, Scope] = {
    "/v1/chat/completions": "use",
    "/v1/models": "use",
    "/agentguard/events": "observe",
    "/agentguard/sessions": "observe",
    "/guard/v1/economics": "observe",
    "/guard/v1/watch": "observe",
    "/metrics": "observe",
    "/agentguard/sessions/limit": "control",
    "/agentguard/close": "control",
    "/agentguard/tts": "control",
    "/agentguard/pin": "control",
    "/agentguard/tails": "control",
}
PREFIX = "ag_"
RELOAD_S = 2.0
"""A revoked key is refused, and its event streams end, within about this time."""
MIN_OPEN_KEY = 32
"""Characters of a key given by flag, where others than this machine's users can try to guess it."""
KEY_S = "give clients a key with --api-key or AGENTGUARD_API_KEY, or make keys with 'agentguard keys add'"


def scope_of(path: str) -> Scope | None:
    """What a path needs, None for nothing."""
    return None if path in OPEN else ROUTES.get(path, "control")


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secret. ``digest``: SHA-256 of the whole key, in hex."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    digest: str
    created: float = 0.0


def digest_of(key: str) -> str:
    return hashlib.sha256(f"agentguard key\0{key}".encode(errors="replace")).hexdigest()


def new_key(name: str, scopes: Collection[Scope]) -> tuple[str, Key]:
    """The key as its owner gets it, once, and what is kept of it."""
    key_id = secrets.token_hex(6)
    text = f"{PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    return text, Key(key_id, name, tuple(s for s in SCOPES if s in scopes), digest_of(text), time.time())


_NOBODY = Key("", "nobody", (), digest_of(secrets.token_urlsafe(32)))


def default_file() -> Path:
    return state_dir() / "keys.json"


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


def read_keys(path: Path) -> list[Key]:
    """The keys of a file, none where there is no file. Raises ConfigError for what is no such file, and for one that others than
    its owner may write: whoever can write it can make keys."""
    try:
        status = path.stat()
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError("keys", str(path), f"cannot be read ({error.strerror}); 'agentguard keys add' makes it") from None
    _check_owner(path, status)
    try:
        keys = msgspec.json.decode(raw, type=_Kept).keys
    except msgspec.DecodeError as error:
        raise ConfigError("keys", str(path), f"is no file of keys ({error}); restore it, or remove it and make new keys") from None
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError("keys", str(path), "holds an id twice; remove one of them")
    return keys


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_mode & 0o022 or status.st_uid not in (0, os.getuid()):
        raise ConfigError("keys", str(path), "others may write it, and so make keys; chmod 600 it, and look who has")


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Whole or not at all, for its owner alone."""
    kept = list(keys)
    if len(kept) > MAX_KEYS:
        raise ConfigError("keys", len(kept), f"a file holds at most {MAX_KEYS}; revoke some with 'agentguard keys revoke'")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"keys": [asdict(key) for key in kept]}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise ConfigError("keys", str(path), f"cannot be written ({error.strerror}); choose another file with --file") from None


def scopes_of(asked: Iterable[str]) -> tuple[Scope, ...]:
    """Raises ConfigError for a word that is no scope."""
    names = list(asked)
    for name in names:
        if name not in SCOPES:
            raise ConfigError("scope", name, nearest(name, SCOPES))
    return tuple(scope for scope in SCOPES if scope in names)


@dataclass(slots=True)
class Keyring:
    """The keys a gateway takes: those of flags, and those of a file, which is looked at again every `RELOAD_S` seconds.

    ``open_scopes`` need no key. A keyring with a file wants keys even when the file holds none: revoking the last key must not open
    the gateway.
    """

    flags: tuple[Key, ...] = ()
    file: Path | None = None
    open_scopes: frozenset[Scope] = ALL
    _kept: dict[str, Key] = field(default_factory=dict)
    _seen: float = float("-inf")
    _stamp: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, api_key: str | None = None, operator_key: str | None = None, file: Path | None = None) -> Keyring:
        """``api_key`` alone has every scope; beside an operator's key it may use and observe. An operator's key alone leaves use
        and observe open, which only a loopback address allows. Reads the file: raises ConfigError."""
        flags: list[Key] = []
        if api_key is not None:
            scopes: tuple[Scope, ...] = SCOPES if operator_key is None else ("use", "observe")
            flags.append(Key("flag", "--api-key", scopes, digest_of(api_key)))
        if operator_key is not None:
            flags.append(Key("flag", "--operator-key", SCOPES, digest_of(operator_key)))
        if api_key is not None or file is not None:
            needs_none: frozenset[Scope] = frozenset()
        else:
            needs_none = ALL if operator_key is None else frozenset(("use", "observe"))
        ring = cls(tuple(flags), file, needs_none)
        ring._reload()
        return ring

    @property
    def asks(self) -> bool:
        """Does any route need a key?"""
        return self.open_scopes != ALL

    @property
    def keyed(self) -> bool:
        """Does every route but health need one?"""
        return not self.open_scopes

    def find(self, token: str) -> Key | None:
        """The key this is, None for none."""
        if not 0 < len(token) <= MAX_KEY_CHARACTERS:
            return None
        digest = digest_of(token)
        kept = self._kept.get(token.removeprefix(PREFIX).partition("_")[0], _NOBODY)
        found: Key | None = None
        for key in (kept, *self.flags):  # all of them, so that the time says nothing about which
            if hmac.compare_digest(digest, key.digest) and key is not _NOBODY:
                found = key
        return found

    def alive(self, key: Key) -> bool:
        """Is a key that was found still one?"""
        return key in self.flags or self._kept.get(key.id) == key

    async def refresh(self) -> None:
        """Look at the file again where it is time to."""
        if self.file is None or time.monotonic() - self._seen < RELOAD_S:
            return
        self._seen = time.monotonic()
        try:
            await asyncio.to_thread(self._reload)
        except ConfigError as error:
            # those known stay, so nobody is locked out
            logger.error("keys_unreadable", extra={"error": str(error), "kept": len(self._kept)})

    def _reload(self) -> None:
        self._seen = time.monotonic()
        if self.file is None:
            return
        try:
            status = self.file.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:
            stamp = None
        if stamp is not None and stamp == self._stamp:
            return
        self._kept = {key.id: key for key in read_keys(self.file)}
        self._stamp = stamp


def check_address(host: str, keys: Keyring) -> None:
    """``host``: the address that is listened on. Raises ConfigError for one that others can reach, unless every route but health
    needs a key that cannot be guessed."""
    try:
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return
    except ValueError:
        pass  # a name is not proof of anything
    if not keys.keyed:
        raise ConfigError("host", host, f"is reachable from outside; {KEY_S}, or bind to 127.0.0.1")


def check_flags(host: str, given: Mapping[str, str | None]) -> None:
    """Raises ConfigError for a short key on an address others can reach. ``given``: flags and their keys."""
    try:
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return
    except ValueError:
        pass
    for flag, key in given.items():
        if key is not None and len(key) < MIN_OPEN_KEY:
            remedy = f"can be guessed from outside; use at least {MIN_OPEN_KEY} characters, as 'agentguard keys add' does"
            raise ConfigError(flag, f"{len(key)} characters", remedy)


class RequireKey:
    """Pure-ASGI middleware: 401 without a key, 403 with one that has not the route's scope. What it found is left in the scope's
    state as ``agentguard_key``. An observer's stream ends when its key is revoked; a step that runs is finished."""

    def __init__(self, app: Any, keys: Keyring) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # a WebSocket: there are none, and the server ends it
        needed = scope_of(scope["path"])
        if needed is None or needed in self._keys.open_scopes:
            await self.app(scope, receive, send)
            return
        await self._keys.refresh()
        key = self._keys.find(bearer(scope["headers"]))
        if key is None:
            message = "authorization: missing or wrong API key; send it as 'Authorization: Bearer …'"
            await _refuse(401, message, {"www-authenticate": "Bearer"})(scope, receive, send)
        elif needed not in key.scopes:
            message = f"authorization: key {key.name!r} may {' and '.join(key.scopes) or 'do nothing'}; this needs {needed!r}"
            await _refuse(403, message)(scope, receive, send)
        else:
            scope.setdefault("state", {})["agentguard_key"] = key
            await self.app(scope, receive, self._until_revoked(key, send) if needed == "observe" else send)

    def _until_revoked(self, key: Key, send: Any) -> Any:
        over = False

        async def guarded(message: Any) -> None:
            nonlocal over
            if over:
                # what servers raise when the client is gone; Starlette ends the stream's generator
                raise OSError("the key was revoked")
            if message["type"] == "http.response.body" and message.get("more_body"):
                await self._keys.refresh()
                if not self._keys.alive(key):
                    over = True
                    await send({"type": "http.response.body", "body": b": the key was revoked\n\n", "more_body": False})
                    return
            await send(message)

        return guarded


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The token of the one Authorization header, "" without one or with several."""
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1 or not given[0].startswith(b"Bearer "):
        return ""
    return given[0][len(b"Bearer ") :].decode("latin-1")


def _refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": status, "param": "authorization"}
    return JSONResponse({"error": error}, status, headers)
