"""What the operator wants: a recipe, validated at the edge.

A recipe is YAML or TOML; unknown keys are refused with the nearest match. Inside the program the frozen models below are passed
around. Where the values of a run come from besides the recipe is in `agentguard.configuration`.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from agentguard.errors import ConfigError, nearest, shown
from agentguard.limits import MAX_RECIPE
from agentguard.rulespec import RuleSpec
from agentguard.tts_settings import TtsSettings


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


NOT_MEASURED: Final = "not measured"
"""What `About.measured` says of a recipe of which nobody has taken figures."""


class About(_Model):
    """What a recipe is for, and what is known of it. Nothing of the program reads it but `agentguard recipes`."""

    summary: str = Field(min_length=1)
    """One sentence."""
    measured: str = Field(min_length=1)
    """The figures with n, seed and interval, or "not measured"."""
    source: str | None = None
    """The page of docs/ that the figures are from, with the command; needed unless nothing was measured."""

    @pydantic.model_validator(mode="after")
    def _sourced(self) -> About:
        if self.source is None and not self.measured.startswith(NOT_MEASURED):
            raise ValueError(f"figures without a source; name the page of docs/ they are from, or begin with {NOT_MEASURED!r}")
        return self


class Cutoff(_Model):
    """When a trace is closed (architecture.md, "The adaptive cutoff")."""

    mode: Literal["adaptive", "fixed", "off"] = "adaptive"
    """adaptive: f between f_min and f_max; fixed: f_max alone; off: only a budget the client asks for, and no continuation."""
    f_min: float = Field(0.80, gt=0, le=1)
    """Cutoff fraction of the budget under full growth pressure."""
    f_max: float = Field(0.85, gt=0, le=1)
    """Cutoff fraction without growth pressure."""
    answer_floor: int = Field(64, ge=1)
    """Tokens always kept for the answer."""
    half_below: int = Field(512, ge=0)
    """A smaller budget keeps half of itself for the answer."""
    think_tokens: int | None = Field(None, ge=0)
    """Think budget of a request that names none; None leaves it to the fractions. Think budgets count all blocks of a step."""
    deadline_s: float | None = Field(None, gt=0)
    """Seconds after which a trace is closed, None for no limit."""
    loops: bool = True
    """Close a trace that repeats itself."""
    ready: float | None = Field(None, gt=0, le=1)
    """Close a trace once the target gave its end marker this probability and went on; None: off. Needs the plugin's tap."""
    margin: int = Field(8, ge=0)
    """Tokens of the context window never used (chat template, rounding of drafts)."""

    @pydantic.field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads the word as a boolean

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Cutoff:
        if self.f_min > self.f_max:
            raise ValueError(f"f_min {self.f_min} is above f_max {self.f_max}; swap them")
        return self


class Economics(_Model):
    """Which sessions run under which rule, and when a losing rule is switched off (docs/economics.md)."""

    control: float = Field(0.05, ge=0, lt=1)
    """Share of sessions that run strict as the control group, whenever there is a relaxed arm."""
    arms: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Relaxed arms: rule and weight. Empty: the recipe's rule, if it is relaxed."""
    key: str = Field("agentguard", min_length=1, max_length=64)
    """Key of the hash that assigns sessions; gateways with the same key agree."""
    guard: bool = True
    """Switch a losing arm to strict; off: measure only."""
    exploration: float = Field(0.02, ge=0, le=1)
    """Share of sessions that go on under an arm that was switched off."""
    min_sessions: int = Field(50, ge=2)
    """Sessions an arm before a verdict, and before a class is judged by its own sums."""
    baseline: str | dict[str, float] = "live"
    """What arms are compared with: "live" (the control group), the JSON file of a study, or fixed means a step, such as
    {rounds: 60}."""
    store: str | None = None
    """Where estimates survive a restart: sqlite:PATH, or redis://HOST:PORT/DB to share them between gateways; None: store.url."""

    @pydantic.field_validator("baseline")
    @classmethod
    def _means(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(value, dict):
            if not all(0 < mean < math.inf for mean in value.values()):
                raise ValueError("a mean a step is a finite number greater than 0")
            if "rounds" not in value:
                raise ValueError("needs at least 'rounds', which the verdict is about")
        return value

    @pydantic.field_validator("arms")
    @classmethod
    def _known_rules(cls, value: dict[str, float]) -> dict[str, float]:
        seen: dict[str, str] = {}
        for rule in value:
            spec = RuleSpec.parse(rule, what="arms")
            if not spec.relaxed:
                raise ValueError(f"{rule!r} is strict, which the control group is; name relaxed rules")
            text = str(spec.for_request())
            if text in seen:
                raise ValueError(f"{rule!r} and {seen[text]!r} are the same rule; keep one")
            seen[text] = rule
        return value

    @pydantic.model_validator(mode="after")
    def _comparable(self) -> Economics:
        if self.arms and self.control == 0 and self.baseline == "live":
            raise ValueError("control: 0 leaves nothing to compare the arms with; give a share, or a baseline")
        return self


class SessionLimits(_Model):
    """What a whole session may use before the guard warns and stops it. Generated tokens count, re-sent context does not."""

    steps: int | None = Field(None, ge=1)
    """Model calls of a session; None for no limit."""
    tokens: int | None = Field(None, ge=1)
    """Generated tokens of a session; None for no limit."""
    no_progress: int | None = Field(8, ge=2)
    """Steps in a row that were cut for a loop, ended without an answer, repeated a request or asked what the engine refuses, before
    the alarm; None: never."""
    stop_without_progress: bool = False
    """Refuse further steps after that alarm."""
    soft: float = Field(0.8, gt=0, le=1)
    """Share of a limit at which the guard warns."""


class StoreOptions(_Model):
    """Where sessions outlive the gateway, and how long (docs/reliability.md)."""

    url: str | None = None
    """sqlite:PATH, or redis://HOST:PORT/DB for several gateways; None keeps sessions in memory."""
    retention_days: float = Field(30.0, gt=0, le=366)
    """A session that nobody has used for so long is deleted."""
    sessions_per_caller: int = Field(10_000, ge=1)
    """Past so many a caller's own least recently used session gives way."""
    lease_s: float = Field(30.0, ge=1)
    """How long a step's reservation outlives a worker that died."""


class ServingLimits(_Model):
    """What the gateway takes on at once, and how long it waits (docs/reliability.md)."""

    running: int = Field(256, ge=1)
    """Steps that run at once; more wait."""
    queue: int = Field(512, ge=0)
    """Steps that wait; more are refused with 503."""
    per_caller: int = Field(128, ge=1)
    """Steps of one caller, running and waiting; more are refused with 429."""
    queue_s: float = Field(60.0, gt=0)
    """How long a step waits for its turn."""
    send_s: float = Field(120.0, gt=0)
    """A client that takes nothing for so long is given up."""
    drain_s: float = Field(30.0, ge=0)
    """How long running steps may go on once the gateway was told to end."""


class EngineOptions(_Model):
    """How vLLM is started."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(None, ge=16)
    """Context window in tokens; None takes the model's."""
    max_num_seqs: int = Field(64, ge=1)
    draft_tokens: int = Field(6, ge=1, le=32)
    """K, the drafted tokens of a round."""
    draft_method: Literal["auto", "draft_model", "eagle3"] = "auto"
    """A draft that is a model of its own, or an EAGLE-3 head on the target's hidden states; auto: as the draft's config.json says,
    or its name where it is not on disk."""
    reasoning_parser: str | None = None
    """vLLM's parser for the model's think markers; None: the family's."""
    tool_parser: str | None = None
    """vLLM's parser for the model's tool calls (hermes for Qwen and others), which coding agents need; None: no tools."""
    kv_cache_gb: float = Field(1.0, gt=0)
    """Memory of the KV cache in GiB, on CPU."""
    start_timeout_s: float = Field(300.0, gt=0)
    extra_args: tuple[str, ...] = ()
    """Passed on to vLLM's API server as they are."""


class Policy(_Model):
    """A whole recipe."""

    about: About | None = None
    """What the recipe is for and what was measured of it."""
    model: str
    """Path or name of the target model."""
    draft: str | None = None
    """Path or name of the draft model; None runs without speculation."""
    rule: str = "strict"
    """Verification rule of requests that ask for none."""
    phase: Literal["think", "answer", "both"] = "think"
    """Where the rule may relax."""
    markers: str | tuple[str, str] | None = None
    """The model's family (agentguard.trace.markers), or its start and end marker; None: derived from the model's files or name."""
    cutoff: Cutoff = Cutoff()
    limits: SessionLimits = SessionLimits()
    economics: Economics = Economics()
    store: StoreOptions = StoreOptions()
    serving: ServingLimits = ServingLimits()
    tts: TtsSettings | None = None
    """Let the draft model learn while it drafts (docs/tts.md); {} takes the defaults, None leaves it as it is."""
    engine: EngineOptions = EngineOptions()
    content: bool = False
    """Let operators read the latest words of running traces (`GET /agentguard/tails`). They are in no event and in no recording."""
    media_hosts: tuple[str, ...] = ()
    """Hosts from which clients may let the engine fetch images, audio and video, over https; none unless named (SECURITY.md)."""
    max_sessions: int = Field(10_000, ge=1)
    """Sessions a worker has at hand; past that the caller with the most gives up its least recently used one."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Policy:
        rule = RuleSpec.parse(self.rule, what="rule")
        if self.economics.arms and rule.relaxed:
            raise ValueError(f"rule: {self.rule} and economics.arms are both given; name the rule among the arms, with a weight")
        if self.tts is not None and self.draft is None:
            raise ValueError("tts is given without a draft model to train; name one in 'draft'")
        return self

    @pydantic.field_validator("tts", mode="before")
    @classmethod
    def _tts_settings(cls, value: Any) -> Any:
        return TtsSettings.parse(value) if isinstance(value, dict) else value

    @pydantic.field_validator("rule")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        return str(RuleSpec.parse(value, what="rule"))


def load(path: Path) -> Policy:
    """Read and validate a recipe. Raises ConfigError naming the field, the value and the remedy."""
    return parse(read(path))


def read(path: Path, what: str = "recipe") -> dict[str, Any]:
    """A recipe's mapping, not validated yet; model paths that exist relative to the file are made so. Raises ConfigError, in which
    the file is called ``what``.

    A file whose name ends in .toml is TOML, in `pyproject.toml` its table `tool.agentguard`; anything else is YAML.
    """
    kind = "TOML" if path.suffix == ".toml" else "YAML"
    try:
        if path.stat().st_size > MAX_RECIPE:
            raise ConfigError(what, str(path), f"has more than {MAX_RECIPE} bytes; give the path of a recipe")
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if kind == "TOML" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(what, str(path), f"cannot be read ({error.strerror}); give the path of a YAML or TOML file") from None
    except RecursionError:
        raise ConfigError(what, str(path), "is nested too deep; a recipe has three levels") from None
    except (yaml.YAMLError, ValueError) as error:  # their own errors, and those of Python's numbers, dates and UTF-8
        raise ConfigError(what, str(path), f"is not {kind}: {shown(str(error), 400)}") from None
    if path.name == "pyproject.toml":
        tools = raw.get("tool")
        raw = tools.get("agentguard", {}) if isinstance(tools, dict) else {}
    if not isinstance(raw, dict):
        raise ConfigError(what, str(path), "is not a mapping; it needs at least 'model: PATH'")
    for key in ("model", "draft"):
        value = raw.get(key)
        if isinstance(value, str) and (path.parent / value).exists():
            raw[key] = str(path.parent / value)
    return raw


def parse(raw: dict[str, Any]) -> Policy:
    """A Policy from a mapping. Raises ConfigError."""
    try:
        return Policy.model_validate(raw)
    except pydantic.ValidationError as error:
        raise _config_error(error) from None
    except UnicodeEncodeError:  # YAML writes such a half as "\\ud800", and pydantic cannot even complain of it
        raise ConfigError("recipe", "…", "holds half a surrogate pair, which is no character; write whole ones") from None


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors and other tools; `agentguard config schema` prints it."""
    made = Policy.model_json_schema()
    made["$defs"]["TtsSettings"]["additionalProperties"] = False  # a dataclass, whose keys `TtsSettings.parse` checks
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "agentguard recipe"}


def _config_error(error: pydantic.ValidationError) -> ConfigError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    field, value = ".".join(where) or "recipe", first.get("input")
    if first["type"] == "extra_forbidden":
        model: type[BaseModel] = Policy
        for part in where[:-1]:
            annotation = model.model_fields[part].annotation
            model = next(one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, BaseModel))
        return ConfigError(field, value, f"unknown key; {nearest(where[-1], model.model_fields)}")
    return ConfigError(field, value, first["msg"].removeprefix("Value error, "))
