"""What is fuzzed in this process, and what must hold: each target makes an input from a random source and checks the code with it.

A check returns "accepted" or "refused", so that a run can show that it saw both, and raises for a bug: `Bug` where a property does
not hold, and every exception that the target does not promise. ``bug`` (module, what stands there, what is put there instead) has to
be found in a copy.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import httpx2
import msgspec
import yaml

from agentguard.errors import AgentGuardError, ConfigError
from agentguard.limits import MAX_DEPTH
from tests.fuzz import make
from tests.fuzz.planted import planted


class Bug(AssertionError):
    """A property that does not hold."""


@dataclass(frozen=True)
class Target:
    """``make(rng)``: an input. ``check(modules, input)``: with the modules of ``of``, by their last name, or planted copies."""

    name: str
    of: tuple[str, ...]
    make: Callable[[random.Random], Any]
    check: Callable[[dict[str, ModuleType], Any], str]
    bug: tuple[str, str, str]
    least: float = 0.02
    """Share of inputs that must be accepted, and that must be refused: a fuzzer that only ever sees one of them tests little."""
    refuses: bool = True

    def modules(self, *, with_bug: bool = False) -> dict[str, ModuleType]:
        found = {name.rpartition(".")[2]: importlib.import_module(name) for name in self.of}
        if with_bug:
            found[self.bug[0].rpartition(".")[2]] = planted(*self.bug)
        return found

    def input(self, seed: int, number: int) -> Any:
        return self.make(random.Random(f"{self.name}/{seed}/{number}"))


TARGETS: dict[str, Target] = {}


def target(
    *of: str, make: Callable[[random.Random], Any], bug: tuple[str, str, str], least: float = 0.02, refuses: bool = True
) -> Callable[[Any], Any]:
    def register(check: Callable[[dict[str, ModuleType], Any], str]) -> Any:
        name = check.__name__.replace("_", "-")
        TARGETS[name] = Target(name, of, make, check, bug, least, refuses)
        return check

    return register


def refused(error: ConfigError) -> str:
    """Every refusal names its field, says what to do, and is short."""
    if not error.field or not error.remedy:
        raise Bug(f"a refusal without field or remedy: {error}")
    if len(str(error)) > 4000:
        raise Bug(f"a message of {len(str(error))} characters")
    str(error).encode("utf-8", "backslashreplace")
    return "refused"


# -- server-sent events --------------------------------------------------------------------------------------------------------

CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHUNK = {
    "id": "c", "choices": [{"index": 0, "delta": {"content": "x", "tool_calls": [CALL]}, "token_ids": [1]}],
    "usage": {"prompt_tokens": 1},
}  # fmt: skip
_SSE = [
    "data: ",
    "data:",
    "data",
    "event: message",
    "id: 1",
    "retry: 5",
    ": ping",
    "\n",
    "\n\n",
    "\r",
    "\r\n",
    "\r\n\r\n",
    "[DONE]",
    "é",
    "\ufeff",
]


@dataclass
class Events:
    pieces: list[bytes]
    sent: list[str] | None
    """What must come out, where the input is a whole stream of ours."""


def make_events(rng: random.Random) -> Events:
    if rng.random() < 0.4:
        texts = [json.dumps(make.bent(rng, CHUNK), ensure_ascii=True) for _ in range(rng.randrange(4))] + ["[DONE]"] * (
            rng.random() < 0.5
        )
        end = rng.choice(("\n", "\r\n", "\r"))
        stream = "".join(f"{': ping' + end + end if rng.random() < 0.2 else ''}data: {text}{end}{end}" for text in texts)
        return Events(make.cuts(rng, stream.encode()), texts)
    soup = make.text(rng, [*_SSE, json.dumps(CHUNK)], 20).encode("utf-8", "surrogatepass")
    return Events(make.cuts(rng, make.bent_bytes(rng, soup) if rng.random() < 0.5 else soup), None)


def _read_events(sse: ModuleType, pieces: list[bytes]) -> list[str]:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    request = httpx2.Request("POST", "http://127.0.0.1")
    response = httpx2.Response(200, headers=headers, content=iter(pieces), request=request)
    return [event.data for event in sse.EventSource(response, 1 << 20)]


@target(
    "httpx2._sse", "agentguard.engines.openai_http", make=make_events,
    bug=("httpx2._sse", 'if text.endswith("\\r"):', 'if text.endswith("\\r\\r"):'),
)  # fmt: skip
def sse(modules: dict[str, ModuleType], given: Events) -> str:
    """The same events come out however the bytes are cut; each is a chunk, or is refused in one of our errors."""
    events = _read_events(modules["_sse"], given.pieces)
    if events != _read_events(modules["_sse"], [b"".join(given.pieces)]):
        raise Bug("cut otherwise, other events")
    if given.sent is not None and events != given.sent:
        raise Bug(f"sent {given.sent}, got {events}")
    seen = "accepted" if events else "refused"
    for data in events:
        try:
            if not isinstance(modules["openai_http"]._chunk(data), dict):
                raise Bug("no chunk, and no error")
        except AgentGuardError as error:
            if len(str(error)) > 4000:
                raise Bug("a long message") from None
            seen = "refused"
    return seen


def make_chunk(rng: random.Random) -> str:
    dice = rng.random()
    if dice < 0.5:
        return make.dumped(rng, make.bent(rng, CHUNK, ["error", "code", "message", "choices"])).decode("utf-8", "replace")
    if dice < 0.7:
        return json.dumps({"error": make.value(rng, ["code", "message", "type", "400"])})
    if dice < 0.72:
        return "[" * rng.randrange(100_000) + "]"
    return make.bent_bytes(rng, json.dumps(CHUNK).encode(), [b"NaN", b"1e999", b"\\ud800", b"{", b"9" * 5000]).decode(
        "utf-8", "replace"
    )


@target(
    "agentguard.engines.openai_http", make=make_chunk,
    bug=("agentguard.engines.openai_http", "    if not isinstance(chunk, dict):\n", "    if chunk is None:\n"),
)  # fmt: skip
def upstream_chunk(modules: dict[str, ModuleType], data: str) -> str:
    """What an upstream says in an event, an error's body among it."""
    try:
        chunk = modules["openai_http"]._chunk(data)
    except AgentGuardError as error:
        if len(str(error)) > 4000 or not 400 <= getattr(error, "status", 502) < 600:
            raise Bug(f"{len(str(error))} characters, status {getattr(error, 'status', None)}") from None
        return "refused"
    if not isinstance(chunk, dict) or chunk.get("error") is not None:
        raise Bug(f"taken for a chunk: {data[:80]}")
    msgspec.json.encode(chunk)  # UTF-8, and no NaN
    return "accepted"


# -- think and answer apart ----------------------------------------------------------------------------------------------------

_PAIRS = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("ab", "ba"),
    ("aab", "b"),
    ("`", "``"),
    ("\n", "\n\n"),
]


@dataclass
class Split:
    pairs: list[tuple[str, str]]
    pieces: list[str]
    opened: bool
    special: bool


def make_split(rng: random.Random) -> Split:
    pairs = rng.sample(_PAIRS[:5], rng.randrange(1, 3)) if rng.random() < 0.9 else [rng.choice(_PAIRS)]
    words = [w for pair in pairs for w in pair]
    words += [w[:i] for w in words for i in (1, len(w) - 1)] + ["`", "``", "```", "\n", "x", " "]
    whole = make.text(rng, words, 24)
    if rng.random() < 0.02:
        whole += "`" * rng.randrange(300)
    return Split(pairs, make.cuts(rng, whole, 12), rng.random() < 0.3, rng.random() < 0.5)


def _split(module: ModuleType, given: Split, pieces: list[str]) -> list[tuple[str, str]]:
    splitter = module.Splitter(given.pairs, opened=given.opened, special_tokens=given.special)
    out: list[list[str]] = []
    fed = told = 0
    bound = max(len(word) for pair in given.pairs for word in pair) + module.LONGEST_RUN + 1
    for piece in pieces:
        segments = splitter.feed(piece)
        fed += len(piece)
        for kind, text in segments:
            told += len(text)
            _append(out, kind, text)
        if len(splitter._held) > bound:
            raise Bug(f"{len(splitter._held)} characters are held back, at most {bound} need be")
    for kind, text in splitter.finish():
        _append(out, kind, text)
    return [(kind, text) for kind, text in out]


def _append(out: list[list[str]], kind: str, text: str) -> None:
    if not text:
        raise Bug("an empty segment")
    if out and out[-1][0] == kind:
        out[-1][1] += text
    else:
        out.append([kind, text])


def _without_markers(given: Split, whole: str, texts: str) -> bool:
    """Is ``texts`` the whole with some markers taken out? Walks both."""
    words = sorted({word for pair in given.pairs for word in pair}, key=len, reverse=True)
    reachable = {0}
    for character in texts:
        after: set[int] = set()
        for at in _skips(whole, reachable, words):
            if whole[at : at + 1] == character:
                after.add(at + 1)
        reachable = after
    return len(whole) in _skips(whole, reachable, words)


def _skips(whole: str, places: set[int], words: list[str]) -> set[int]:
    found, todo = set(places), list(places)
    while todo:
        at = todo.pop()
        for word in words:
            if whole.startswith(word, at) and at + len(word) not in found:
                found.add(at + len(word))
                todo.append(at + len(word))
    return found


@target(
    "agentguard.trace.splitter", make=make_split, refuses=False,
    bug=(
        "agentguard.trace.splitter", "for i in range(1, len(marker))}", "for i in range(1, len(marker) - 1)}",
    ),
)  # fmt: skip
def splitter(modules: dict[str, ModuleType], given: Split) -> str:
    """Segments do not depend on the cuts, hold all of the text but markers, and little is held back."""
    module, whole = modules["splitter"], "".join(given.pieces)
    cut = _split(module, given, given.pieces)
    at_once = _split(module, given, [whole])
    if cut != at_once:
        raise Bug(f"cut: {cut}, at once: {at_once}")
    if len(whole) < 200 and not _without_markers(given, whole, "".join(text for _, text in cut)):
        raise Bug(f"{whole!r} became {cut}")
    return "accepted"


# -- markers -------------------------------------------------------------------------------------------------------------------

_NAMES = [
    "qwen3", "Qwen3-8B", "-instruct", "deepseek-r1", "deepseek-v3.1", "/", "glm-4.5", "kimi-k2", "models--a--b", "granite-3.2", "gpt-oss",
    "gemma-4", "magistral", "-", "\\", ".", "snapshots", "qwq", "nemotron-3-nano", "minimax-m2",
]  # fmt: skip
_MARKS = [
    "<think>", "</think>", "<|channel|>", "<|end|>", "analysis", "<|message|>", "[THINK]", "[/THINK]", "<x_think_start>", "<x_think_end>",
    "<thought>", "</thought>", "<reasoning\\g>", "</reasoning\\g>", "◁think▷", "<|begin_thought|>", "<|end_thought|>", "<think\\1>", "</think\\1>",
]  # fmt: skip
_JINJA = [
    "{% set t = '",
    "' %}",
    "{% if add_generation_prompt %}",
    "{{ '",
    "' }}",
    "' + '",
    "' ~ '",
    "{%- endif %}",
    "enable_thinking",
    'set x = "',
    '"',
]
_PARSERS = ["", "qwen3", "deepseek_r1", "granite", "openai_gptoss", "no_such"]


@dataclass
class Model:
    name: str
    files: dict[str, bytes]
    parser: str


def make_model(rng: random.Random) -> Model:
    words = [*_MARKS, *_JINJA]
    template = make.text(rng, words, 20)
    tokens = {str(i): {"content": rng.choice(_MARKS), "special": True} for i in range(rng.randrange(4))}
    config = {"added_tokens_decoder": tokens, "chat_template": template, "eos_token": "x"}
    if rng.random() < 0.2:
        config["chat_template"] = [{"name": rng.choice(("default", "tool_use")), "template": template}]
    files: dict[str, bytes] = {}
    if rng.random() < 0.8:
        files["tokenizer_config.json"] = make.dumped(rng, make.bent(rng, config, _MARKS))
    if rng.random() < 0.3:
        added = {"added_tokens": [{"id": 1, "content": rng.choice(_MARKS)} for _ in range(rng.randrange(3))]}
        files["tokenizer.json"] = make.dumped(rng, make.bent(rng, added, _MARKS))
    if rng.random() < 0.3:
        files["chat_template.jinja"] = template.encode("utf-8", "surrogatepass" if rng.random() < 0.05 else "replace")
    for name in files:
        if rng.random() < 0.03:
            files[name] = make.bent_bytes(rng, files[name])
    if files and rng.random() < 0.005:
        files[rng.choice([*files])] = b"[" * 100_000
    return Model(make.text(rng, _NAMES, 5), files, rng.choice(_PARSERS))


_FOLDER: list[Path] = []


def _folder() -> Path:
    """One in memory, for the files of an input."""
    if not _FOLDER:
        _FOLDER.append(Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)))  # mkdtemp's own, 0700
    return _FOLDER[0]


@target(
    "agentguard.trace.markers", make=make_model,
    bug=("agentguard.trace.markers", "except (ValueError, RecursionError) as error:", "except RecursionError as error:"),
)  # fmt: skip
def markers(modules: dict[str, ModuleType], given: Model) -> str:
    """Any directory of a model gives a family with two different markers, or a refusal that names it."""
    module, folder = modules["markers"], _folder()
    for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "chat_template.json"):
        if name in given.files:
            (folder / name).write_bytes(given.files[name])
        else:
            (folder / name).unlink(missing_ok=True)
    try:
        found = module.derive(given.name, *module.read(folder), given.parser)
    except ConfigError as error:
        return refused(error)
    pair = found.family.markers
    if not pair.start or not pair.end or pair.start == pair.end or not found.statement:
        raise Bug(f"{pair} of {given.name!r}")
    if found != module.derive(given.name, *module.read(folder), given.parser):
        raise Bug("another time, another family")
    return "accepted"


# -- recipes -------------------------------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "model": "m", "draft": "d", "rule": "strict", "phase": "think", "markers": ["<think>", "</think>"], "content": False, "max_sessions": 5,
    "cutoff": {"mode": "adaptive", "f_min": 0.8, "f_max": 0.85, "answer_floor": 64, "think_tokens": 100, "deadline_s": 1.5, "loops": True},
    "limits": {"steps": 5, "tokens": 100, "no_progress": 8, "soft": 0.5},
    "economics": {"control": 0.1, "arms": {"cactus:delta=0.25": 1.0, "typical:eps=0.09,delta=0.3": 2}, "baseline": {"rounds": 60}},
    "tts": {"stride": 5, "rate": 0.001, "scope": "lora:4", "window": 256, "reset": "request"},
    "engine": {"dtype": "auto", "max_model_len": 4096, "draft_tokens": 6, "extra_args": ["--x", "y"], "kv_cache_gb": 1.5},
    "media_hosts": ["cdn.example"],
}  # fmt: skip
_RECIPE_WORDS = [
    *RECIPE, *RECIPE["cutoff"], *RECIPE["economics"], *RECIPE["tts"], *RECIPE["engine"], "cactus:delta=0.25", "strict", "top-k:k=3", "live",
    "&a", "*a", "!!python/object/apply:os.system", "<<: *a", "- ", ": ", "{", "}", "[", "]", "|\n", "? ", "---\n", "%YAML 1.1\n", "\t", "#",
]  # fmt: skip


def make_recipe(rng: random.Random) -> bytes | dict[str, Any]:
    some = {key: value for key, value in RECIPE.items() if key == "model" or rng.random() < 0.3}
    if rng.random() < 0.7:
        recipe = make.bent(rng, some, _RECIPE_WORDS)
        if isinstance(recipe, dict):
            return recipe
    # YAML costs 2 ms a recipe, so these are short
    few = dict(rng.sample(sorted(some.items()), min(len(some), 2)))
    raw = yaml.safe_dump(few, default_flow_style=rng.random() < 0.5).encode()
    if rng.random() < 0.001:
        return b"model: " + b"[" * 600
    return make.bent_bytes(rng, raw, [word.encode() for word in _RECIPE_WORDS])


@target(
    "agentguard.policy", make=make_recipe,
    bug=("agentguard.policy", "    except pydantic.ValidationError as error:\n        raise _config_error(error) from None", "    except TypeError as error:\n        raise _config_error(error) from None"),
)  # fmt: skip
def recipe(modules: dict[str, ModuleType], given: bytes | dict[str, Any]) -> str:
    """A recipe is a policy, or is refused with the field's name; a policy can be written down and read again."""
    module = modules["policy"]
    try:
        if isinstance(given, bytes):
            file = _folder() / "recipe.yaml"
            file.write_bytes(given)
            given = module.read(file)
        policy = module.parse(given)
    except ConfigError as error:
        return refused(error)
    if type(policy).model_validate(policy.model_dump()) != policy:
        raise Bug("read again it is another")
    return "accepted"


# -- rules and per-request knobs -----------------------------------------------------------------------------------------------

_RULES = [
    "strict", "cactus", "cactus-exact", "typical", "top-k", "lenience", "mentored", "fuzzy", "r-fuzzy", "casc-opt", "interp", ":", ",", "=",
    "delta=0.25", "eps=0.09", "k=3", "p_min=0.1", "top_k=10", "h_max=2", "inf", "-inf", "nan", "0", "1", "0.5", "1e-3", "-1", "1_0", " ",
]  # fmt: skip
_VALID = [
    "strict",
    "cactus:0.25",
    "cactus:delta=0.25,p_min=0.1,top_k=10",
    "typical:eps=0.09,delta=0.3",
    "top-k:3",
    "casc-opt:-inf",
    "r-fuzzy:0",
]


def make_xargs(rng: random.Random) -> Any:
    rule = (
        rng.choice(_VALID) + (rng.choice(_RULES) if rng.random() < 0.3 else "") if rng.random() < 0.6 else make.text(rng, _RULES, 8)
    )
    xargs: dict[str, Any] = {
        "ag_rule": rule,
        "ag_phase": rng.choice(("think", "answer", "both")),
        "ag_think_tokens": rng.randrange(5000),
    }
    xargs = {key: held for key, held in xargs.items() if rng.random() < 0.7}
    return make.bent(rng, xargs, ["ag_rule", "ag_phase", "ag_think_tokens", "ag_", "other", "ag_rul"])


@target(
    "engine_plugins.vllm.params", "agentguard.rulespec", make=make_xargs,
    bug=("engine_plugins.vllm.params", "or isinstance(think, bool) or think < 0", "or think < 0"),
)  # fmt: skip
def xargs(modules: dict[str, ModuleType], given: Any) -> str:
    """Knobs of a request are understood or refused by name; a rule's text reads back as the same rule."""
    spec = modules["rulespec"].RuleSpec
    default = spec.parse("strict")
    if given is not None and not isinstance(given, dict):
        return "refused"  # vLLM's own check
    try:
        params = modules["params"].RequestParams.read(given, default)
    except ConfigError as error:
        if not error.field.startswith("ag_"):
            raise Bug(f"the field {error.field!r} is none of ours") from None
        return refused(error)
    if params.think_tokens is not None and (type(params.think_tokens) is not int or params.think_tokens < 0):
        raise Bug(f"think_tokens={params.think_tokens!r}")
    if params.phase not in ("think", "answer", "both") or str(spec.parse(str(params.rule))) != str(params.rule):
        raise Bug(f"{params}")
    if any(math.isnan(knob) for knob in params.rule.knobs.values()):
        raise Bug("a knob that is no number")
    return "accepted"


# -- events --------------------------------------------------------------------------------------------------------------------


def _samples() -> list[Any]:
    from agentguard import events as e

    return [_filled(kind) for kind in e.Event.__args__]  # type: ignore[attr-defined]


def _filled(kind: Any) -> dict[str, Any]:
    """A value of a struct, from its types."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    out: dict[str, Any] = {"type": info.tag} if info.tag is not None else {}
    for f in info.fields:
        out[f.encode_name] = _plain(f.type)
    return out


def _plain(kind: Any) -> Any:
    i = msgspec.inspect
    if isinstance(kind, i.StructType):
        return _filled(kind.cls)
    if isinstance(kind, i.UnionType):
        return _plain(kind.types[0])
    if isinstance(kind, i.ListType | i.CollectionType | i.VarTupleType):
        return [_plain(kind.item_type)] * 2
    if isinstance(kind, i.TupleType):
        return [_plain(item) for item in kind.item_types]
    if isinstance(kind, i.DictType):
        return {"k": _plain(kind.value_type)}
    if isinstance(kind, i.LiteralType):
        return kind.values[0]
    if isinstance(kind, i.EnumType):
        return next(iter(kind.cls)).value
    plain = {i.IntType: 3, i.FloatType: 1.5, i.StrType: "s", i.BoolType: True, i.NoneType: None, i.BytesType: "", i.AnyType: 1}
    return plain[type(kind)]


_EVENTS: list[Any] = []
DEEP = (
    b"\x82"
    + msgspec.msgpack.encode("type")
    + msgspec.msgpack.encode("step_finished")
    + msgspec.msgpack.encode("x")
    + b"\x91" * 100_000
)
"""An event with a field nobody knows, nested without end."""


@dataclass
class Wire:
    kind: str
    raw: bytes


def make_wire(rng: random.Random) -> Wire:
    if not _EVENTS:
        _EVENTS.extend(_samples())
    kind = rng.choice(("json", "msgpack", "frame"))
    event = rng.choice(_EVENTS)
    if kind == "frame":
        event = {"t": 1.0, "interval_s": 1.0, "events": rng.sample(_EVENTS, 2), "dropped": 0}
    event = make.bent(rng, event, ["type", "t", "session", "step_finished", "engine"]) if rng.random() < 0.7 else event
    try:
        raw = msgspec.msgpack.encode(event) if kind == "msgpack" else make.dumped(rng, event)
    except (OverflowError, UnicodeEncodeError):  # numbers and halves that msgpack cannot hold
        raw = b"\xc1"
    if rng.random() < 0.3:
        raw = make.bent_bytes(rng, raw)
    if rng.random() < 0.003:
        raw = DEEP if kind == "msgpack" else b'{"type":' + b"[" * 100_000
    return Wire(kind, raw)


@target(
    "agentguard.events", make=make_wire,
    bug=("agentguard.events", "decode_frame = _bounded(_json_frame)", "decode_frame = lambda raw: WatchFrame(**msgspec.json.decode(raw))"),
)  # fmt: skip
def events(modules: dict[str, ModuleType], given: Wire) -> str:
    """What comes from engines, gateways and recordings is an event that can be sent on, or a `ValueError`, which readers expect."""
    module = modules["events"]
    decode = {"json": module.decode_json, "msgpack": module.decode_msgpack, "frame": module.decode_frame}[given.kind]
    try:
        event = decode(given.raw)
    except ValueError:
        return "refused"
    again = module.decode_msgpack(module.encode_msgpack(event)) if given.kind == "msgpack" else decode(module.encode_json(event))
    if again != event and "nan" not in repr(event):
        raise Bug("sent on, it is another")
    return "accepted"


# -- requests ------------------------------------------------------------------------------------------------------------------

BODY: dict[str, Any] = {
    "model": "m", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "seed": 1, "n": 1,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "vllm_xargs": {"ag_rule": "strict"},
    "thinking": {"type": "enabled", "budget_tokens": 100}, "metadata": {"session_id": "s", "user_id": "u_session_1"},
    "chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 5}, "reasoning_effort": "low",
}  # fmt: skip
_BODY_WORDS = [
    *BODY, "role", "content", "image_url", "url", "http://evil", "data:x", "https://cdn.example/x", "kv_transfer_params", "type", "text",
    "user_id", "session_id", "thinking_token_budget", "assistant", "tool", "reasoning", "2026-11-30T", "<system-reminder>", "Mon ",
]  # fmt: skip


def make_body(rng: random.Random) -> bytes:
    some = {key: value for key, value in BODY.items() if key == "messages" or rng.random() < 0.4}
    dice = rng.random()
    if dice < 0.1:
        part = {
            "type": "image_url",
            "image_url": {"url": make.text(rng, ["https://", "cdn.example", "/x", "@", "\\", "data:", "http://", ":22", "\t"], 6)},
        }
        some["messages"] = [{"role": "user", "content": [part]}]
    if dice > 0.98:
        depth = rng.choice((MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 900, 5000, 100_000))
        return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
    raw = make.dumped(rng, make.bent(rng, some, _BODY_WORDS))
    if rng.random() < 0.3:
        raw = make.bent_bytes(
            rng, raw, [b"NaN", b"Infinity", b"1e999", b"\\ud800", b"\xed\xa0\x80", b"9" * 5000, b"\\u0000", b"{", b"["]
        )
    if rng.random() < 0.02:
        raw = raw.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    return raw


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v) if isinstance(x, dict | list)]
        depth += 1
    return depth


def _urls(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, held in value.items():
            yield from _urls(held, "url" if name.endswith("url") else "")
    elif isinstance(value, list):
        for held in value:
            yield from _urls(held, "")
    elif isinstance(value, str) and key:
        yield value


@target(
    "agentguard.gateway.app", "agentguard.requests", "agentguard.gateway.fetches", "agentguard.identity", "agentguard.redact", make=make_body,
    bug=("agentguard.gateway.app", "json.loads(raw.decode(), parse_constant=_no_constant, parse_float=_finite)", "json.loads(raw, parse_constant=_no_constant)"),
)  # fmt: skip
def request_body(modules: dict[str, ModuleType], raw: bytes) -> str:
    """A body is read, given a session, and can be sent on; or it is refused with the field's name."""
    try:
        body = modules["app"].parse_body(raw)
        if _depth(body) > MAX_DEPTH:
            raise Bug("too deep")
        asked = modules["requests"].ChatRequest.read(body)
        modules["fetches"].check_fetches(body, ("cdn.example",))
        who = modules["identity"].identify({"authorization": "Bearer x"}, body)
        _ = asked.budget
    except ConfigError as error:
        return refused(error)
    # as httpx2 sends it
    json.dumps(asked.forwarded(), ensure_ascii=False, allow_nan=False).encode()
    asked.fingerprint(), asked.tool_names(), asked.limit, asked.thinking_off
    modules["identity"].Guesses().place(who, body)
    if not str(who).isascii() or not str(who).isprintable() or len(str(who)) > 300:
        raise Bug(f"a session called {str(who)!r}")
    for url in _urls([m.get("content") for m in body["messages"]]):
        if url.strip()[:5].lower() != "data:" and not url.strip().startswith("https://cdn.example"):
            raise Bug(f"the engine may fetch {url!r}")
    quoted = " ".join(str(m.get("content")) for m in body["messages"])
    shown = modules["redact"].without_content(f"bad input {quoted[:300]!r}", body)
    longest = max((m["content"] for m in body["messages"] if isinstance(m.get("content"), str)), key=len, default="")
    if len(longest) >= 40 and longest.isalnum() and longest[4:36] in shown:
        raise Bug("words of the prompt in a message")
    return "accepted"


# -- sessions' headers ---------------------------------------------------------------------------------------------------------

_HEADERS = [
    "x-agentguard-session",
    "x-session-id",
    "session_id",
    "x-acme-session-id",
    "x-parent-session-id",
    "baggage",
    "x-claude-code-agent-id",
]


def make_headers(rng: random.Random) -> dict[str, str]:
    names = rng.sample(
        [*_HEADERS, "x-agentguard-agent", "x-agentguard-caller", "authorization", "x-litellm-trace-id"], rng.randrange(4)
    )
    return {n: make.text(rng, ["abc", "session.id=", "session.id=s1;p=1", ",", "=", "Bearer k", "é"], 4) for n in names}


@target("agentguard.identity", make=make_headers, bug=("agentguard.identity", r"[\x21-\x7e]{1,256}", r"[\x01-\xff]{1,256}"))
def session_headers(modules: dict[str, ModuleType], headers: dict[str, str]) -> str:
    """An id is printable ASCII whatever header it came by, or is refused by that header's name."""
    try:
        who = modules["identity"].identify(headers, {"messages": [{"role": "user", "content": "x"}]})
    except ConfigError as error:
        if error.field not in headers:
            raise Bug(f"{error.field!r} was not sent") from None
        return refused(error)
    if not all(part.isascii() and part.isprintable() and " " not in part for part in (who.caller, who.session, who.agent)):
        raise Bug(f"{who!r}")
    return "accepted"


# -- metrics of an upstream ----------------------------------------------------------------------------------------------------

_METRICS = [
    "vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:time_to_first_token_seconds_bucket", '{engine="0",model_name="m"}', "{", "}",
    'le="0.5"', 'le="+Inf"', ",", " ", " 1.0", " NaN", " -Inf", "\n", "# TYPE vllm:num_requests_running gauge\n", "# HELP x y\n", '"', "\\",
    "vllm:request_success_total", 'finished_reason="stop"', " 1e999", " 1 1 1", "process_x",
]  # fmt: skip
_EXPOSITION = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 17.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
"""


def make_exposition(rng: random.Random) -> str:
    if rng.random() < 0.3:
        numbers = ("2.0", "17.0", "1.0", "NaN", "+Inf", "-Inf", "1e308", "1e999", "-1", "1_0", "0x1")
        lines = [line.rpartition(" ") for line in _EXPOSITION.splitlines() * rng.randrange(1, 3)]
        return "".join(f"{a}{b}{c if a.startswith('#') else rng.choice(numbers)}\n" for a, b, c in lines)
    if rng.random() < 0.6:
        return make.bent_bytes(rng, _EXPOSITION.encode(), [word.encode() for word in _METRICS]).decode("utf-8", "replace")
    return make.text(rng, _METRICS, 20)


@target(
    "agentguard.telemetry.exposition", "agentguard.events", make=make_exposition,
    bug=("agentguard.telemetry.exposition", "if abs(sample.value) <= LARGEST:", "if sample.value > -math.inf:"),
)  # fmt: skip
def exposition(modules: dict[str, ModuleType], text: str) -> str:
    """An upstream's /metrics are numbers that can be sent on, or a `ValueError`."""
    try:
        rows = modules["exposition"].read(text, 1.0)
    except ValueError:
        return "refused"
    for row in rows:
        numbers = [*row.gauges.values(), *row.counters.values(), *(count for pairs in row.buckets.values() for _, count in pairs)]
        if not all(math.isfinite(number) for number in numbers):
            raise Bug(f"{row}")
        modules["events"].decode_json(modules["events"].encode_json(row))
    return "accepted" if rows else "refused"


# -- HTTP as bytes -------------------------------------------------------------------------------------------------------------

_HTTP = [
    b"GET /v1/models HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\n", b"host: a\r\n", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"\r\n",
    b"5\r\nhello\r\n", b"0\r\n\r\n", b"authorization: Bearer x\r\n", b"expect: 100-continue\r\n", b"connection: upgrade\r\nupgrade: websocket\r\n",
    b"content-length: -1\r\n", b" folded\r\n", b"\0", b"x" * 3000, b"y: " + b"z" * 2000 + b"\r\n", b"HTTP/1.1", b"GET http://evil/ HTTP/1.1\r\n",
    b"OPTIONS * HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /%00%ff HTTP/1.1\r\n", b"5;" + b"e" * 3000, b"\n",
]  # fmt: skip


def make_http(rng: random.Random) -> list[bytes]:
    raw = b"".join(rng.choice(_HTTP) for _ in range(rng.randrange(1, 14)))
    if rng.random() < 0.4:
        raw = rng.choice(_HTTP[:2]) + rng.choice(_HTTP[2:5]) + b"\r\n" + raw
    if rng.random() < 0.3:
        raw = make.bent_bytes(rng, raw, _HTTP)
    if rng.random() < 0.1:
        raw += rng.choice(_HTTP) * rng.randrange(1, 60)
    if rng.random() < 0.1:
        raw = _HTTP[0] + b"x-a: " + b"v" * rng.randrange(60_000)
    return make.cuts(rng, raw)


class _Transport:
    """What a protocol needs of a connection, without one."""

    def __init__(self) -> None:
        self.closing = False
        self.sent = bytearray()

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Later:
    """A loop that only takes orders."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def call_later(self, _: float, call: Any) -> Any:
        handle = mock.Mock(cancel=lambda: self.orders.remove(handle) if handle in self.orders else None, call=call)
        self.orders.append(handle)
        return handle

    def create_task(self, work: Any) -> Any:
        work.close()
        return mock.Mock()


_CONFIG: list[Any] = []


@target(
    "agentguard.gateway.protocol", make=make_http,
    bug=("agentguard.gateway.protocol", "        self._silent += len(data)\n", ""),
)  # fmt: skip
def http_bytes(modules: dict[str, ModuleType], pieces: list[bytes]) -> str:
    """Any bytes are a request or an answer with the field's name; what is kept of them is bounded, and the wait has an end."""
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    if not _CONFIG:
        _CONFIG.append(Config(lambda *_: None, ws="none", log_config=None, lifespan="off"))
        _CONFIG[0].load()
        import logging

        logging.getLogger("uvicorn.error").disabled = True
    module, loop, transport = modules["protocol"], _Later(), _Transport()
    small = mock.patch.multiple(module, MAX_HEADERS_BYTES=4096, MAX_HEADERS=20, MAX_URL=1024)
    with small:
        connection = module.BoundedHttp(_CONFIG[0], ServerState(), {}, _loop=loop)
        connection.connection_made(transport)
        if len(loop.orders) != 1:
            raise Bug("no end to the wait for a first byte")
        begun = 0
        for piece in pieces:
            connection.data_received(piece)
            begun = begun + len(piece) if connection.cycle is None else 0
            if transport.closing:
                break
            if connection._silent > 4096 + len(piece) or begun > 4096 + 2 * max(map(len, pieces)):
                raise Bug(f"{begun} bytes of headers, and no end")
            if connection.cycle is None and not loop.orders:
                raise Bug("no end to the wait for headers")
        refused_with = bytes(transport.sent)
        connection.connection_lost(None)
        if any(order.call == connection._too_slow for order in loop.orders):
            raise Bug("a timer is left")
    if refused_with.startswith(b"HTTP/1.1 4"):
        error = json.loads(refused_with.partition(b"\r\n\r\n")[2])["error"]
        if not error["param"]:
            raise Bug("no field")
        return "refused"
    return "accepted"
