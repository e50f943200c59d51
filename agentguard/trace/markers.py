"""The tokens between which a model thinks, by model family: start and end, what closes a trace, what history keeps of it.

A row holds what the named source says. Marks of the sources: [vllm] a file of vLLM 0.32.0; [template] the model's chat template
(llama.cpp's `models/templates`, read at ggml-org, Raudbjorn/ggml-llama.cpp@ae1a0b1 and chynggi/gigatoken-llama.cpp);
[issue] and [doc] as named. The tests hold every row that names a vLLM parser against that parser.

Not checked, for want of the file: whether the markers of DeepSeek V3 and V4, GLM, Kimi K2, MiniMax M2, Granite 4.2 and Gemma 4 are
added tokens (their vLLM parsers look them up as such); how Granite 4.2 and Kimi-VL treat old traces (UNKNOWN); Kimi K2.5's own
template (its prompt and history are read from other engines' renderers); Qwen3's sentence on Qwen3.5 and later.

For an unknown model `derive` reads the tokenizer and the chat template, and says what it read and what it assumes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentguard.errors import ConfigError, nearest
from agentguard.policy import Policy


@dataclass(frozen=True, slots=True)
class Markers:
    """A model family's start and end markers as text."""

    start: str = "<think>"
    end: str = "</think>"


class History(StrEnum):
    """What the chat template does with the traces of former steps that a client sends back."""

    DROPPED = "dropped"
    LAST_TURN = "last_turn"
    """Kept since the last user message, so through a tool loop; dropped or emptied before it."""
    KEPT = "kept"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models thinks."""

    name: str
    markers: Markers
    aliases: tuple[Markers, ...] = ()
    """Further pairs that open and close a block, from other versions of the family."""
    transition: str = ""
    """The sentence a forced close writes before the end marker; "" for none."""
    label: str = ""
    """What the model writes behind the start marker before its first thought (Gemma 4: the channel's name)."""
    lead: str = ""
    """What has to stand between the end marker and the answer (harmony: the header of the final channel)."""
    history: History = History.UNKNOWN
    opened: bool | None = None
    """Whether the generation prompt opens the block itself; None where it depends on the request or the template's version."""
    parsers: tuple[str, ...] = ()
    """vLLM's --reasoning-parser names, the one to use first."""
    models: tuple[str, ...] = ()
    """Patterns of lower-case model names, matched at the start of a word."""
    special: bool = False
    """The markers are added tokens of the tokenizer rather than plain text."""

    @property
    def closing(self) -> str:
        """The exact text of a forced close: transition, end marker, and what must follow for the answer to begin."""
        return self.transition + self.markers.end + self.lead

    @property
    def parser(self) -> str:
        """vLLM's --reasoning-parser, "" where vLLM has none."""
        return self.parsers[0] if self.parsers else ""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The family's pairs for `Splitter`, its own first."""
        return [(pair.start, pair.end) for pair in (self.markers, *self.aliases)]


_THINK = Markers()
# QwenLM/Qwen3, docs/source/getting_started/quickstart.md; the blank line behind the marker is left to the model
_QWEN3_HANDOVER = "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"

_FAMILIES = (
    # [template] Qwen3-0.6B: the model opens; Qwen3.5-4B and, in a copy of its tokenizer_config.json, Qwen3-4B-Thinking-2507: the
    # prompt does. There the tokens are added ones, not special. [vllm] parser/qwen3.py. Instruct-2507, Coder, Embedding, Reranker
    # and Guard do not think.
    Family(
        "qwen3", _THINK, transition=_QWEN3_HANDOVER, history=History.LAST_TURN, parsers=("qwen3",), special=True,
        models=(r"qwen-?3(?![0-9])(?!.*-instruct)(?!-?(?:coder|embedding|reranker|guard|asr|tts))",),
    ),
    # [template] QwQ-32B. [doc] vLLM, features/reasoning_outputs: with deepseek_r1, which needs both tokens in the vocabulary
    Family("qwq", _THINK, history=History.DROPPED, opened=True, models=("qwq",), special=True),
    # [template] R1-Distill-Qwen-32B and -Llama-8B open; [doc] SGLang: R1-0528 writes <think> itself. [vllm]
    # reasoning/deepseek_r1_reasoning_parser.py. Added tokens, not special (tokenizer.json of the Qwen distills).
    Family(
        "deepseek-r1", _THINK, history=History.DROPPED, parsers=("deepseek_r1",), special=True,
        models=("deepseek-r1", "r1-(?:distill|0528|1776)"),
    ),
    # [template] V3.1, also shipped with V3.2-Exp. [vllm] reasoning/deepseek_v3_reasoning_parser.py: only with thinking asked for
    Family(
        "deepseek-v3.1", _THINK, history=History.DROPPED, parsers=("deepseek_v3",), special=True,
        models=(r"deepseek-v3\.1", r"deepseek-v3\.2-exp"),
    ),
    # [vllm] tokenizers/deepseek_v32.py and deepseek_v32_encoding.py (the model has no Jinja template)
    Family(
        "deepseek-v3.2", _THINK, history=History.LAST_TURN, parsers=("deepseek_v3",), special=True, models=(r"deepseek-v3\.2",),
    ),
    # [vllm] tokenizers/deepseek_v4_encoding.py, deepseek_v41_encoding.py: kept with tools, without them since the last user message
    Family(
        "deepseek-v4", _THINK, history=History.KEPT, parsers=("deepseek_v4", "deepseek_v41"), special=True,
        models=("deepseek-v4",),
    ),
    # [template] GLM-4.5, 4.6 (the model opens), 4.7-Flash, also 5.2 (ik_llama.cpp) and 5.3-Flash (sglang, docker/) (the prompt
    # does); clear_thinking=false keeps all. [vllm] parser/glm47_moe.py
    Family(
        "glm", _THINK, history=History.LAST_TURN, parsers=("glm45", "glm47"), special=True, models=(r"glm-?(?:4\.[5-9]|[5-9])",),
    ),
    # [template] Kimi-K2-Thinking: the model opens, traces kept since the last answer without a tool call. K2.5 and later: the
    # prompt opens (tinker-cookbook, renderers/kimi_k2_5.py). [vllm] parser/kimi_k2.py
    Family(
        "kimi-k2", _THINK, history=History.LAST_TURN, parsers=("kimi_k2",), special=True,
        models=(r"kimi-k2(?:-thinking|[.p][5-9])",),
    ),
    # [template] Kimi-K3. [vllm] reasoning/kimi_k3_reasoning_parser.py: each marker is three tokens
    Family(
        "kimi-k3", Markers("<|open|>think<|sep|>", "<|close|>think<|sep|>"), lead="<|open|>response<|sep|>",
        history=History.KEPT, parsers=("kimi_k3",), models=("kimi-k3",), special=True,
    ),
    # [issue] MoonshotAI/Kimi-Dev#6: plain text, three tokens. [doc] SGLang, separate_reasoning; LLaMA-Factory, template kimi_vl
    Family("kimi-vl", Markers("◁think▷", "◁/think▷"), models=("kimi-vl.*thinking", "kimi-dev")),
    # [template] MiniMax-M2. [vllm] reasoning/minimax_m2_reasoning_parser.py: the model never writes the start marker
    Family(
        "minimax-m2", _THINK, history=History.LAST_TURN, opened=True, parsers=("minimax_m2", "minimax_m2_append_think"),
        models=("minimax-m2",), special=True,
    ),
    # [template] MiniMax-M3: rendered for every turn. [vllm] reasoning/minimax_m3_reasoning_parser.py: in the vocabulary, yet
    # sometimes written in pieces
    Family(
        "minimax-m3", Markers("<mm:think>", "</mm:think>"), history=History.KEPT, parsers=("minimax_m3",),
        models=("minimax-m3",), special=True,
    ),
    # [vllm] reasoning/granite_reasoning_parser.py, "Here's" seen with quantized models; [template] as granite-io carries it.
    # vLLM's parser names no marker strings, so its thinking_token_budget needs --reasoning-config
    Family(
        "granite-3.2", Markers("Here is my thought process:", "Here is my response:"),
        aliases=(Markers("Here's my thought process:", "Here's my response:"),),
        history=History.KEPT, opened=False, parsers=("granite",), models=(r"granite-3\.2",),
    ),
    # [template] granite-3.3-2b-instruct, only with thinking asked for; the answer may come in <response> tags
    Family("granite-3.3", _THINK, history=History.KEPT, opened=False, models=(r"granite-3\.3",)),
    # [vllm] parser/granite_thinking.py. [doc] IBM, models/granite4-2. 4.0 and 4.1 do not think [template]
    Family("granite-4.2", _THINK, parsers=("granite_thinking_parser",), models=(r"granite-4\.[2-9]",), special=True),
    # [template] Llama-3_3-Nemotron-Super-49B-v1_5 (the model opens), Nemotron-Nano-v2 (the prompt does). [issue]
    # vllm-project/vllm#21041: plain text, no such tokens
    Family("nemotron", _THINK, history=History.DROPPED, models=("nemotron-(?:nano|super|ultra)",)),
    # [template] Nemotron-3-Nano-30B-A3B: truncate_history_thinking=false keeps all. [vllm] parser/nemotron_v3.py. Single tokens by
    # the model card, as a discussion quotes it
    Family(
        "nemotron-3", _THINK, history=History.LAST_TURN, parsers=("nemotron_v3",), special=True,
        models=(r"nemotron-?3(?:\.\d+)?-(?:nano|super|ultra|lightning)",),
    ),
    # [template] Ministral-3-14B-Reasoning; mistral_common, tokens/tokenizers/base.py. [vllm] parser/mistral.py: <think> as plain
    # text with v11 tokenizers (Magistral-Small-2506)
    Family(
        "magistral", Markers("[THINK]", "[/THINK]"), aliases=(_THINK,), history=History.KEPT, opened=False, parsers=("mistral",),
        models=("magistral", "ministral-3-.*reasoning"), special=True,
    ),
    # [template] gemma-4-31B-it: kept since the last user message, and only beside a tool call; without thinking the prompt holds
    # an empty block. [vllm] parser/gemma4.py: behind a tool response the prompt may open it
    Family(
        "gemma-4", Markers("<|channel>", "<channel|>"), label="thought\n", history=History.LAST_TURN, parsers=("gemma4",),
        models=("gemma-?4(?![0-9]*b)",), special=True,
    ),
    # [template] gpt-oss-120b; openai/harmony, docs/format.md. [vllm] parser/harmony.py; its reasoning parser names no strings.
    # [issue] kekzl/imp#800: behind <|end|> alone the model opens the analysis channel again, so the answer's header is forced too
    Family(
        "gpt-oss", Markers("<|channel|>analysis<|message|>", "<|end|>"), lead="<|start|>assistant<|channel|>final<|message|>",
        history=History.LAST_TURN, opened=False, parsers=("openai_gptoss",), models=("gpt-?oss",), special=True,
    ),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}
_PATTERNS = [(family, re.compile(rf"(?<![a-z0-9])(?:{'|'.join(family.models)})")) for family in _FAMILIES]


def family(name: str) -> Family:
    """A family by its registry name; ConfigError for an unknown one."""
    if name not in FAMILIES:
        raise ConfigError("markers", name, nearest(name, FAMILIES))
    return FAMILIES[name]


def for_model(model: str) -> Family | None:
    """The family a model id or path names, None for an unknown one and for one that does not think (Qwen3-*-Instruct-2507).

    Of several families in one name the first counts: DeepSeek-R1-0528-Qwen3-8B is an R1.
    """
    parts = [part for part in re.split(r"[/\\]", model.lower()) if part]
    # a snapshot in the hub's cache is called by its hash
    cached = next((part.rpartition("--")[2] for part in parts if part.startswith("models--")), "")
    name = cached or (parts[-1] if parts else "")
    found = [(match.start(), -len(match.group()), row) for row, pattern in _PATTERNS if (match := pattern.search(name))]
    return min(found, key=lambda hit: hit[:2])[2] if found else None


def for_parser(parser: str) -> Family | None:
    """The family of a vLLM reasoning parser; of several that share it, the one it is named after."""
    return next((row for row in _FAMILIES if parser in row.parsers), None)


def generic(
    start: str = _THINK.start, end: str = _THINK.end, *, transition: str = "", lead: str = "", opened: bool | None = None,
    history: History = History.UNKNOWN, parser: str = "", special: bool = False,
) -> Family:  # fmt: skip
    """A pair from a recipe, or the usual one."""
    for field, value in (("markers.start", start), ("markers.end", end)):
        if not value:
            raise ConfigError(
                field, value, "write the text that opens and the text that closes a trace, for example <think> </think>"
            )
    if start == end:
        raise ConfigError("markers", (start, end), "the start and end markers must differ, else a second block cannot be told")
    return Family(
        "generic", Markers(start, end), transition=transition, lead=lead, opened=opened, history=history,
        parsers=(parser,) if parser else (), special=special,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Derived:
    family: Family
    statement: str
    """One sentence for the log: what was read where, and what is only assumed."""


def derive(
    model: str, tokenizer_config: Mapping[str, Any] | None = None, chat_template: str | None = None, parser: str = ""
) -> Derived:
    """The family of a model: by its name, else by vLLM's parser, else the pair its tokenizer or chat template shows, else <think>.

    The files win over the name and the parser: a known family whose markers neither file holds is not taken.
    """
    files = _Files(tokenizer_config, chat_template)
    shown = files.pair()
    known, origin = for_model(model), "its name"
    if known is None and (known := for_parser(parser)) is not None:
        origin = f"the parser {parser!r}"
    doubt = ""
    if known is not None:
        says = f"{model!r} is {known.name} by {origin}"
        if not files.given:
            return Derived(known, f"{says}; none of its files was read")
        pairs = (known.markers, *known.aliases)
        if (pair := next((pair for pair in pairs if files.has(pair)), None)) is not None:
            row = known
            if pair != known.markers:
                row = replace(known, markers=pair, aliases=tuple(p for p in pairs if p != pair), special=files.single(pair))
            return _opened(files, row, f"{says}, and {_text(pair)} are in {files.where(pair)}")
        if shown is None and not known.special:
            return Derived(known, f"{says}; {_text(known.markers)} are plain text, which {files.named} need not show")
        doubt = f" ({origin} says {known.name}, but {_text(known.markers)} are not in {files.named})"
    if shown is None:
        seen = f"{files.named} shows none, so it may not think at all" if files.given else "none of its files was read"
        return Derived(generic(), f"no markers are known for {model!r}{doubt} and {seen}; {_text(_THINK)} are assumed")
    pair = shown
    owners = [row for row in _FAMILIES if row.markers == pair]
    if len(owners) == 1:
        found = f"{model!r} is taken for {owners[0].name}, whose {_text(pair)} are in {files.where(pair)}{doubt}"
        return _opened(files, owners[0], found)
    row = generic(pair.start, pair.end, parser=parser if known is None else "", special=files.single(pair))
    found = f"{_text(pair)} of {model!r} were found in {files.where(pair)}{doubt}"
    return _opened(files, row, f"{found}; that a close needs the end marker alone is assumed, and what history keeps is unknown")


def of_policy(policy: Policy) -> Derived:
    """The family of a recipe's model: as the recipe says, else derived. Reads files. Raises ConfigError."""
    if isinstance(policy.markers, str):
        return Derived(family(policy.markers), f"{policy.markers!r} is what the recipe says")
    if policy.markers is not None:
        start, end = policy.markers
        return Derived(generic(start, end), f"{start!r} and {end!r} are what the recipe says")
    config, template = read(Path(policy.model)) if Path(policy.model).is_dir() else (None, None)
    return derive(Path(policy.model).name, config, template, policy.engine.reasoning_parser or "")


def read(directory: Path) -> tuple[dict[str, Any] | None, str | None]:
    """A model directory's tokenizer_config.json, with the added tokens, and its chat template; None for what is not there."""
    config = _json(directory / "tokenizer_config.json")
    if not (config or {}).get("added_tokens_decoder"):
        # transformers 5 leaves them in tokenizer.json
        added = (_json(directory / "tokenizer.json") or {}).get("added_tokens")
        tokens = [token for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
        if tokens:
            config = {**(config or {}), "added_tokens_decoder": {str(token.get("id")): token for token in tokens}}
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return config, file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError("model", str(file), f"is not UTF-8 ({error}); download the model again") from None
    # a processor's template has a file of its own in older models
    return config, _template(config) or _template(_json(directory / "chat_template.json"))


class _Files:
    """What the tokenizer and the chat template hold."""

    def __init__(self, config: Mapping[str, Any] | None, template: str | None) -> None:
        decoder = (config or {}).get("added_tokens_decoder")
        added = decoder.values() if isinstance(decoder, Mapping) else ()
        self.tokens = [str(token.get("content", "")) for token in added if isinstance(token, Mapping)]
        self.template = template or _template(config) or ""
        self._sources: dict[str, list[str] | str] = {"its tokenizer": self.tokens, "its chat template": self.template}
        self.given = bool(self.tokens or self.template)

    @property
    def named(self) -> str:
        """The files that were read."""
        return " or ".join(name for name, held in self._sources.items() if held)

    def has(self, pair: Markers) -> bool:
        """Whether either file holds the pair. An end marker with a slash is proof alone: where the model opens the block itself, a
        template need not name the start."""
        held = list(self._sources.values())
        return _in(pair.end, *held) and ("/" in pair.end or _in(pair.start, *held))

    def single(self, pair: Markers) -> bool:
        """Whether both markers are added tokens."""
        return pair.start in self.tokens and pair.end in self.tokens

    def where(self, pair: Markers) -> str:
        return " and ".join(name for name, held in self._sources.items() if _in(pair.end, held)) or self.named

    def pair(self) -> Markers | None:
        """The pair the files show: a known one first, one that both show before one of the tokenizer, then one of the template."""
        known = [*dict.fromkeys(pair for row in _FAMILIES for pair in (row.markers, *row.aliases))]
        for candidates in (known, [*_look_alikes(self.tokens), *_look_alikes(_WORD.findall(self.template))]):
            shown = [
                (not _in(pair.end, self.tokens), not _in(pair.end, self.template), i)
                for i, pair in enumerate(candidates)
                if self.has(pair)
            ]
            if shown:
                return candidates[min(shown)[2]]
        return None

    def prompt(self, markers: Markers) -> str:
        """What the template's generation prompt does, one of `_PROMPTS`; "" where that cannot be told."""
        _, asked, tail = self.template.rpartition("add_generation_prompt")
        for name, _, text in re.findall(r"set\s+(\w+)\s*=\s*(['\"])(.*?)\2", self.template):
            if text in (markers.start, markers.end):
                tail = re.sub(rf"\b{name}\b", lambda _, text=text: f"'{text}'", tail)  # type: ignore[misc]  # its backslashes are its own
        if not asked or markers.start not in self.template:
            return ""
        tail = re.sub(r"['\"]\s*[+~]\s*['\"]", "", tail)
        # a block that the same literal closes is the empty one of a request without thinking
        blocks = [re.split(r"['\"{]", rest, maxsplit=1)[0] for rest in tail.split(markers.start)[1:]]
        if all(markers.end in block for block in blocks):
            return _LEAVES
        return _DEPENDS if "think" in tail.replace(markers.start, "").replace(markers.end, "").lower() else _OPENS


_OPENS, _LEAVES, _DEPENDS = "opens the block", "leaves the opening to the model", "opens the block as the request asks"
_PROMPTS: Mapping[str, bool | None] = {_OPENS: True, _LEAVES: False, _DEPENDS: None}
_WORD = re.compile(r"<[^<>\s'\"{}]{1,40}>|\[[^\[\]\s'\"{}]{1,40}\]")
_SWAPS = (("start", "end"), ("START", "END"), ("begin", "end"), ("BEGIN", "END"), ("open", "close"))


def _look_alikes(words: list[str]) -> Iterator[Markers]:
    """Words that look like a start marker and have their end marker beside them: <x>…</x>, <|x_start|>…<|x_end|>."""
    present = set(words)
    for word in dict.fromkeys(words):
        if not re.search("think|thought|reason", word, re.IGNORECASE):
            continue
        ends = [f"{word[0]}/{word[1:]}", *(word.replace(start, end) for start, end in _SWAPS if start in word)]
        yield from (Markers(word, end) for end in ends if end in present)


def _in(marker: str, *held: list[str] | str) -> bool:
    """Whether a file holds a marker, whole or in its control tokens: harmony's is several, Kimi K3's template puts it together."""
    pieces = re.findall(r"<\|\w+\|>", marker)
    return any(marker in file or (pieces and all(piece in file for piece in pieces)) for file in held)


def _opened(files: _Files, row: Family, statement: str) -> Derived:
    """Take what the template says of the generation prompt."""
    prompt = files.prompt(row.markers)
    if not prompt:
        return Derived(row, statement)
    return Derived(replace(row, opened=_PROMPTS[prompt]), f"{statement}; its generation prompt {prompt}")


def _text(pair: Markers) -> str:
    return f"{pair.start!r} and {pair.end!r}"


def _template(config: Mapping[str, Any] | None) -> str | None:
    """The chat template of a config: a text, or the default one of a list of named ones."""
    template = (config or {}).get("chat_template")
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", str(file), f"is not JSON ({error}); download the model again") from None
    return content if isinstance(content, dict) else None
