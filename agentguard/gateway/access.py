"""How a gateway may be reached: its keys, the names it answers to, and TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentguard.errors import ConfigError
from agentguard.gateway.auth import Keyring, check_address, check_flags, default_file


@dataclass(frozen=True, slots=True)
class Access:
    """How the gateway may be reached. ``keys``: who may do what; ``allowed_hosts``: names it answers to without keys; ``tls``: the
    server's side of HTTPS, None for plain HTTP."""

    keys: Keyring = field(default_factory=Keyring)
    allowed_hosts: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None
    told: dict[str, Any] | None = None
    """What `rebuilt` makes it again of, in another process."""

    @classmethod
    def of(cls, access: Access | None, api_key: str | None, operator_key: str | None) -> Access:
        return access or cls(Keyring.of(api_key, operator_key), told={"api_key": api_key, "operator_key": operator_key})


def rebuilt(told: dict[str, Any]) -> Access:
    """The access another process was told of; reads its files. Raises ConfigError."""
    file, tls = told.get("keys"), told.get("tls")
    ring = Keyring.of(told.get("api_key"), told.get("operator_key"), Path(file) if file else None)
    return Access(ring, tuple(told.get("allowed_hosts", ())), tls_context(*tls) if tls else None, told)


def access_of(
    host: str, *, api_key: str | None, operator_key: str | None, keys: Path | None = None, allowed_hosts: tuple[str, ...] = (),
    tls_cert: str | None = None, tls_key: str | None = None, tls_clients: str | None = None,
) -> Access:  # fmt: skip
    """What a command's flags say. ``keys``: the file of `agentguard keys`; None takes the user's own where there is one, so that
    keys somebody made are asked for. Raises ConfigError for flags that do not fit together, and an address others can reach without
    keys."""
    if keys is not None and not keys.exists():
        raise ConfigError("keys", str(keys), "is not there; make a key with 'agentguard keys add NAME --file …'")
    file = keys or (default_file() if default_file().exists() else None)
    ring = Keyring.of(api_key or None, operator_key or None, file)
    address = "127.0.0.1" if host == "localhost" else host
    check_address(address, ring)
    check_flags(address, {"api_key": api_key, "operator_key": operator_key})
    if (tls_cert is None) != (tls_key is None) or (tls_clients and not tls_cert):
        raise ConfigError("tls_cert", tls_cert, "TLS needs --tls-cert and --tls-key together; --tls-clients comes on top of them")
    told: dict[str, Any] = {"api_key": api_key or None, "operator_key": operator_key or None, "keys": str(file) if file else None}
    return rebuilt(told | {"allowed_hosts": list(allowed_hosts), "tls": [tls_cert, tls_key, tls_clients] if tls_cert else None})


def tls_context(certificate: str, key: str, clients: str | None = None) -> ssl.SSLContext:
    """TLS 1.2 or newer. ``clients``: a file of authorities; without a certificate of theirs nobody gets in. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    flag, value = "tls_cert", certificate
    try:
        context.load_cert_chain(certificate, key)
        flag, value = "tls_clients", clients or ""
        _trust(context, clients)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(flag, value, f"cannot be used ({error}); give PEM files, the key that of the certificate") from None
    return context


def _trust(context: ssl.SSLContext, clients: str | None) -> None:
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
