"""Where each value of a run comes from: command line > environment > recipe > project file > user file > default.

    agentguard serve MODEL --rule … --set cutoff.f_max=0.9      the command line
    AGENTGUARD_CUTOFF__F_MAX=0.9                                the environment: `__` stands for the dot, values are YAML
    --recipe NAME|FILE                                          a file that was named
    agentguard.toml, agentguard.yaml, or [tool.agentguard]      the project file: of this folder or the nearest above it, up to
    in pyproject.toml                                           the folder with .git
    ~/.config/agentguard/config.toml or config.yaml             the user file

All of them speak one schema, that of `agentguard.policy.Policy`; a key that is unknown is refused with the nearest match, wherever
it stands. Sections are merged key by key; lists and the mapping of `economics.arms` are taken whole. Layers are pure data; only
`files`, `project_file` and `user_file` look at the disk.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel

from agentguard import policy as policies
from agentguard.dirs import config_dir
from agentguard.errors import ConfigError, nearest
from agentguard.policy import Policy
from agentguard.tts_settings import TtsSettings

PREFIX: Final = "AGENTGUARD_"
DEFAULT: Final = "default"
OTHERS: Final = frozenset(
    {
        "api_key", "operator_key", "upstream_key", "proxy_key", "log_format", "log_level", "tui_config", "tui_keys", "tui_theme",
        "smollm2", "shots", "update_golden",
    }
)  # fmt: skip
"""Variables behind `PREFIX` that are no keys of the policy: secrets, the log's, the monitor's, and those of the tests."""
NOT_FROM_A_PROJECT: Final = {
    "engine.extra_args": "arguments of vLLM can name code to run, and a project file comes with whatever was cloned",
}
"""Keys a project file may not set, and why."""
_SECRET_IN_URL = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]*@")


def _keys(annotation: Any) -> tuple[str, ...]:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return tuple(one.model_fields)
        if one is TtsSettings:
            return tuple(f.name for f in fields(TtsSettings))
    return ()


SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    name: keys for name, info in Policy.model_fields.items() if (keys := _keys(info.annotation))
}
"""The keys of each section; the other keys of a policy hold a value."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values. ``origin``: its name for a reader; ``origins``: of single keys, where they differ (the environment's
    variables); ``path``: of a file."""

    origin: str
    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """The merged values, not validated yet, and the source of each by its dotted key; what is missing is a default."""

    values: dict[str, Any]
    sources: dict[str, str]
    layers: tuple[Layer, ...] = ()

    @property
    def files(self) -> list[Path]:
        """The files that were read, the strongest first."""
        return [layer.path for layer in self.layers if layer.path is not None]

    def policy(self, **missing: Any) -> Policy:
        """Validate; ``missing`` fills keys that no layer gave. Raises ConfigError naming the field, the value, the remedy and the
        place where the value was written."""
        try:
            return policies.parse(missing | self.values)
        except ConfigError as error:
            source = self.source(error.field)
            if source in (DEFAULT, "command line"):
                raise
            raise ConfigError(error.field, error.value, f"{error.remedy} (it stands in {source})") from None

    def source(self, key: str) -> str:
        """Of a dotted key, or of what is inside of it or around it; "default" where nobody gave one."""
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            if found := self.sources.get(".".join(parts[:end])):
                return found
        inside = [source for name, source in self.sources.items() if name.startswith(f"{key}.")]
        return inside[0] if inside else DEFAULT

    def rows(self, policy: Policy) -> list[tuple[str, Any, str]]:
        """(dotted key, value, source) of every value of the policy, with secrets masked."""
        rows: list[tuple[str, Any, str]] = []
        for name, value in policy.model_dump(mode="json").items():
            if name in SECTIONS and isinstance(value, dict):
                rows += [(f"{name}.{key}", masked(one), self.source(f"{name}.{key}")) for key, one in value.items()]
            else:
                rows.append((name, masked(value), self.source(name)))
        return rows


def masked(value: Any) -> Any:
    """The value without passwords: in URLs, and behind an argument whose name says that it is a key, token or password."""
    if isinstance(value, str):
        return _SECRET_IN_URL.sub(r"\1:***@", value)
    if isinstance(value, list):
        shown, hide = [], False
        for one in value:
            name, equals, _ = str(one).partition("=")
            secret = name.startswith("--") and re.search(r"key|token|password|secret", name) is not None
            shown.append("***" if hide else f"{name}=***" if secret and equals else masked(one))
            hide = secret and not equals
        return shown
    return value


def merge(layers: Sequence[Layer]) -> Configuration:
    """The layers, the strongest first, as one. Raises ConfigError for a key nobody knows, naming the layer."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in reversed(layers):
        check_keys(layer)
        for name, value in layer.values.items():
            origin = layer.origins.get(name, layer.origin)
            if name in SECTIONS and isinstance(value, dict):
                if not isinstance(values.get(name), dict):
                    values[name] = {}
                    sources.pop(name, None)
                if not value:  # `tts: {}` turns it on with its defaults
                    sources[name] = origin
                values[name] = values[name] | value
                sources |= {f"{name}.{key}": layer.origins.get(f"{name}.{key}", layer.origin) for key in value}
            else:
                sources = {key: source for key, source in sources.items() if not key.startswith(f"{name}.")}
                values[name], sources[name] = value, origin
    return Configuration(values, sources, tuple(layers))


def check_keys(layer: Layer) -> None:
    """Raises ConfigError for an unknown key of the layer."""
    for name, value in layer.values.items():
        if name not in Policy.model_fields:
            raise _unknown(layer, name, value, Policy.model_fields)
        if name in SECTIONS and isinstance(value, dict):
            for key in value:
                if key not in SECTIONS[name]:
                    raise _unknown(layer, f"{name}.{key}", value[key], SECTIONS[name])


def _unknown(layer: Layer, key: str, value: Any, known: Iterable[str]) -> ConfigError:
    origin = layer.origins.get(key, layer.origin)
    return ConfigError(key, value, f"unknown key in {origin}; {nearest(key.rpartition('.')[2], known)}")


def from_options(options: Mapping[str, Any], settings: Sequence[str] = ()) -> Layer:
    """The command line: options by the policy's key, None for one that was not given, and KEY=VALUE texts of ``--set``.

    Raises ConfigError for a text that is no KEY=VALUE, or whose key is unknown.
    """
    values = {key: value for key, value in options.items() if value is not None}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError("--set", setting, "write it as KEY=VALUE, for example cutoff.f_max=0.9")
        _put(values, key.strip(), text, "--set")
    return Layer("command line", values)


def from_environment(environ: Mapping[str, str] = os.environ) -> Layer:
    """Variables named AGENTGUARD_ and a key of the policy. An empty one counts as not set.

    `OTHERS` are left alone. Raises ConfigError for one that looks like a key of the policy and is none.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in sorted(environ):
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        if not name.startswith(PREFIX) or not environ[name]:
            continue
        if key == "store" and not environ[name].lstrip().startswith("{"):
            key = "store.url"  # its short form, which `agentguard sessions` reads too
        top, dot, _ = key.partition(".")
        if top not in Policy.model_fields:
            if key not in OTHERS and (dot or difflib.get_close_matches(key, Policy.model_fields, n=1, cutoff=0.7)):
                raise ConfigError(name, environ[name], f"no key of the policy; {nearest(top, Policy.model_fields)}")
            continue
        _put(values, key, environ[name], name)
        origins[key] = name
    return Layer("environment", values, origins)


def _put(values: dict[str, Any], key: str, text: str, what: str) -> None:
    """Set a dotted key to a text's value; the key must be known."""
    top, dot, rest = key.partition(".")
    if top not in Policy.model_fields:
        raise ConfigError(what, key, f"no key of the policy; {nearest(top, Policy.model_fields)}")
    if not dot:
        values[top] = _value(top, text, what)
        return
    if top not in SECTIONS:
        raise ConfigError(what, key, f"{top!r} holds a value and no keys; give {top}=VALUE")
    if rest not in SECTIONS[top]:
        raise ConfigError(what, key, f"unknown key; {nearest(rest, SECTIONS[top])}")
    section = values.setdefault(top, {})
    if not isinstance(section, dict):
        raise ConfigError(what, key, f"{top} is given as a whole too; keep one")
    section[rest] = _value(key, text, what)


_TEXTS: Final = frozenset(
    {"model", "draft", "rule", "economics.key", "economics.store", "store.url", "engine.reasoning_parser", "engine.tool_parser"}
)
"""Keys whose value is a text as it stands: a model may be named 1984, a parser `on`."""


def _value(key: str, text: str, what: str) -> Any:
    if key in _TEXTS and text.strip() != "null":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(what, text, f"is no value in YAML ({' '.join(str(error).split())}); quote it") from None


def from_file(path: Path, kind: str) -> Layer:
    """``kind``: recipe, project file or user file. Raises ConfigError for one that cannot be used."""
    layer = Layer(f"{kind} {path}", policies.read(path, kind), path=path)
    if kind == "project file":
        _trusted(path)
        for key, why in NOT_FROM_A_PROJECT.items():
            section, _, name = key.partition(".")
            inside = layer.values.get(section)
            if isinstance(inside, dict) and name in inside:
                remedy = f"is not taken from a project file: {why}; set it in a recipe, the user file or the environment"
                raise ConfigError(key, inside[name], f"{remedy} (it stands in {path})")
    return layer


def _trusted(path: Path) -> None:
    """Raises ConfigError for a project file that another user of this machine could have put there."""
    state = path.stat()
    if state.st_uid not in (0, os.getuid()):
        remedy = f"belongs to another user (uid {state.st_uid}); make it yours, or go to another folder"
        raise ConfigError("project file", str(path), remedy)
    if state.st_mode & 0o002:
        raise ConfigError("project file", str(path), "can be written by everybody; chmod o-w it")


def project_file(start: Path) -> Path | None:
    """The nearest one in ``start`` or a folder above, up to the one with .git or the home folder. Raises ConfigError for two."""
    home = Path.home()
    for folder in (start, *start.parents):
        found = [path for name in ("agentguard.toml", "agentguard.yaml") if (path := folder / name).is_file()]
        pyproject = folder / "pyproject.toml"
        if pyproject.is_file() and policies.read(pyproject, "project file"):
            found.append(pyproject)
        if len(found) > 1:
            raise ConfigError("project file", str(found[1]), f"{found[0].name} beside it configures this project too; keep one")
        if found:
            return found[0]
        if (folder / ".git").exists() or folder == home:
            return None
    return None


def user_file() -> Path | None:
    """The user's own. Raises ConfigError for two."""
    found = [path for name in ("config.toml", "config.yaml") if (path := config_dir() / name).is_file()]
    if len(found) > 1:
        raise ConfigError("user file", str(found[1]), f"{found[0].name} beside it is read too; keep one")
    return found[0] if found else None


def gather(
    options: Mapping[str, Any] | None = None, *, settings: Sequence[str] = (), recipe: Path | None = None,
    environ: Mapping[str, str] = os.environ, directory: Path | None = None,
) -> Configuration:  # fmt: skip
    """All layers of a run in ``directory`` (default: the working directory), merged. Raises ConfigError."""
    layers = [from_options(options or {}, settings), from_environment(environ)]
    if recipe is not None:
        layers.append(from_file(recipe, "recipe"))
    if (found := project_file(directory or Path.cwd())) is not None:
        layers.append(from_file(found, "project file"))
    if (found := user_file()) is not None:
        layers.append(from_file(found, "user file"))
    return merge(layers)


def for_upstream(configuration: Configuration) -> Configuration:
    """The same for a server that runs already: its model is what it serves, unless the command line or the recipe names one."""
    named = ("command line", "recipe ")
    drop = {key for key in ("model", "draft") if not configuration.source(key).startswith(named)}
    values = {key: value for key, value in configuration.values.items() if key not in drop}
    if "draft" in drop:
        values.pop("tts", None)  # it would be refused without a draft, and the engine that runs has settings of its own
    return Configuration(values, configuration.sources, configuration.layers)
