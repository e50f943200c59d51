"""The registry of model families: every row through the splitter and against vLLM's own parser, names, and what files tell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import ConfigError
from agentguard.reference import reference_model
from agentguard.trace import Markers, Splitter
from agentguard.trace.markers import FAMILIES, Family, History, derive, family, for_model, for_parser, generic, read

ROWS = list(FAMILIES.values())
PARSED = [(row, parser) for row in ROWS for parser in row.parsers]


def tokens(*contents: str) -> dict[str, Any]:
    """A tokenizer_config.json as Hugging Face writes it."""
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": False}
    return {"added_tokens_decoder": {str(100 + i): {"content": text, **entry} for i, text in enumerate(contents)}}


def prompt(text: str) -> str:
    """A small template with the given generation prompt."""
    return "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}" + text + "{% endif %}"


STRIPS = "{{ m.content.split('</think>')[-1] }}"


def split(row: Family, chunks: list[str], *, opened: bool = False) -> tuple[str, str]:
    splitter = Splitter(row.pairs, opened=opened, special_tokens=row.special)
    segments = [segment for chunk in chunks for segment in splitter.feed(chunk)] + splitter.finish()
    return "".join(t for kind, t in segments if kind == "think"), "".join(t for kind, t in segments if kind == "answer")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_splits_its_stream_wherever_it_is_cut(row: Family) -> None:
    for pair in (row.markers, *row.aliases):
        think, answer = f"{row.label}2 < 3, so \n", f"{row.lead}yes, 2 < 3"
        stream = f"{pair.start}{think}{pair.end}{answer}"
        for cut in range(len(stream) + 1):
            assert split(row, [stream[:cut], stream[cut:]]) == (think, answer)
        assert split(row, list(stream)) == (think, answer)
        inside = stream.removeprefix(pair.start)
        assert split(row, list(inside), opened=True) == (think, answer)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_forced_close_ends_the_trace_where_the_answer_begins(row: Family) -> None:
    assert row.closing == row.transition + row.markers.end + row.lead
    assert split(row, [f"{row.markers.start}and so on", row.closing, "42"]) == (f"and so on{row.transition}", f"{row.lead}42")


def test_no_marker_of_a_family_begins_another() -> None:
    """The splitter takes the shorter of two such markers when a chunk ends within the longer one."""
    for row in ROWS:
        for side in ({start for start, _ in row.pairs}, {end for _, end in row.pairs}):
            assert not [(a, b) for a in side for b in side if a != b and b.startswith(a)], row.name


def test_qwen3_and_harmony_close_with_their_own_words() -> None:
    assert family("qwen3").closing == (
        "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n</think>"
    )
    assert family("gpt-oss").closing == "<|end|><|start|>assistant<|channel|>final<|message|>"
    others = [row for row in ROWS if row.name not in ("qwen3", "gpt-oss", "kimi-k3")]
    assert all(row.closing == row.markers.end for row in others)


NAMES = {
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-0.6B-FP8": "qwen3",
    "Qwen/Qwen3-235B-A22B-Thinking-2507": "qwen3",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "qwen3",
    "Qwen/Qwen3-VL-8B-Thinking": "qwen3",
    "Qwen/Qwen3.5-4B": "qwen3",
    "unsloth/Qwen3.6-27B-GGUF": "qwen3",
    "qwen3:8b": "qwen3",
    "Qwen/QwQ-32B": "qwq",
    "Qwen/QwQ-32B-AWQ": "qwq",
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-r1",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "deepseek-r1",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "deepseek-r1",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "deepseek-r1",
    "perplexity-ai/r1-1776": "deepseek-r1",
    "deepseek-ai/DeepSeek-V3.1-Terminus": "deepseek-v3.1",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-v3.1",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4",
    "zai-org/GLM-4.5-Air": "glm",
    "zai-org/GLM-4.6": "glm",
    "zai-org/GLM-4.7-Flash": "glm",
    "zai-org/GLM-5.1-FP8": "glm",
    "moonshotai/Kimi-K2-Thinking": "kimi-k2",
    "moonshotai/Kimi-K2.5": "kimi-k2",
    "moonshotai/Kimi-K3": "kimi-k3",
    "moonshotai/Kimi-VL-A3B-Thinking-2506": "kimi-vl",
    "MiniMaxAI/MiniMax-M2.1": "minimax-m2",
    "MiniMaxAI/MiniMax-M3": "minimax-m3",
    "ibm-granite/granite-3.2-8b-instruct": "granite-3.2",
    "ibm-granite/granite-3.3-2b-instruct": "granite-3.3",
    "ibm-granite/granite-4.2-8b": "granite-4.2",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1_5": "nemotron",
    "nvidia/Llama-3.1-Nemotron-Nano-8B-v1": "nemotron",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "nemotron",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning": "nemotron-3",
    "mistralai/Magistral-Small-2509": "magistral",
    "mistralai/Ministral-3-14B-Reasoning-2512": "magistral",
    "google/gemma-4-31B-it": "gemma-4",
    "google/gemma-4-E4B-it": "gemma-4",
    "openai/gpt-oss-20b": "gpt-oss",
    "unsloth/gpt-oss-120b-GGUF": "gpt-oss",
    "/models/qwen3/gpt-oss-20b/": "gpt-oss",
    r"D:\models\GLM-4.6": "glm",
    "/models/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64d72725edaf899c6cb9c377fd0709d9c5": "qwen3",
}
SILENT = [
    "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen/Qwen3-Coder-Next", "Qwen/Qwen3-Embedding-8B",
    "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3Guard-Gen-8B", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen-30B",
    "deepseek-ai/DeepSeek-V3-0324", "moonshotai/Kimi-K2-Instruct-0905", "zai-org/glm-4-9b-chat", "zai-org/chatglm3-6b",
    "google/gemma-3-4b-it", "google/medgemma-4b-it", "ibm-granite/granite-4.0-h-small", "ibm-granite/granite-4.1-8b",
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "mistralai/Ministral-3-8B-Instruct-2512", "meta-llama/Llama-3.3-70B-Instruct", "",
]  # fmt: skip


@pytest.mark.parametrize(("model", "name"), NAMES.items())
def test_real_names_find_their_family(model: str, name: str) -> None:
    found = for_model(model)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("model", SILENT)
def test_models_that_do_not_think_have_no_family(model: str) -> None:
    assert for_model(model) is None


def test_an_unknown_family_and_a_useless_pair_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"markers='qwen-3': did you mean 'qwen3'\? known: deepseek-r1, "):
        family("qwen-3")
    with pytest.raises(ConfigError, match=r"markers\.end=''"):
        generic("<a>", "")
    with pytest.raises(ConfigError, match="must differ"):
        generic("***", "***")
    row = generic("<a>", "</a>", transition="\nTime is up.\n", opened=True, history=History.KEPT, parser="mine")
    assert (row.name, row.closing, row.opened, row.parser) == ("generic", "\nTime is up.\n</a>", True, "mine")
    assert (generic().markers, generic().parser, generic().history) == (Markers(), "", History.UNKNOWN)


def test_a_parser_finds_the_family_it_is_named_after() -> None:
    for row, parser in PARSED:
        found = for_parser(parser)
        assert found is not None
        assert found.markers == row.markers
    for parser, name in {"deepseek_r1": "deepseek-r1", "glm47": "glm", "minimax_m2_append_think": "minimax-m2"}.items():
        assert for_parser(parser) is family(name)
    assert for_parser("seed_oss") is for_parser("") is None


def test_a_known_name_is_held_against_its_files() -> None:
    without = derive("Qwen/Qwen3-8B")
    assert without.family is family("qwen3")
    assert without.statement == "'Qwen/Qwen3-8B' is qwen3 by its name; none of its files was read"
    config = {**tokens("<|im_start|>", "<think>", "</think>"), "chat_template": STRIPS + prompt("{{ '<|im_start|>assistant\\n' }}")}
    both = derive("Qwen/Qwen3-8B", config)
    assert both.family.name == "qwen3"
    assert both.statement.endswith("'<think>' and '</think>' are in its tokenizer and its chat template")
    # the name comes first, the parser is asked only where it says nothing
    assert derive("Qwen/Qwen3-8B", config, parser="deepseek_r1").family.name == "qwen3"
    served = derive("coder", config, parser="deepseek_r1")
    assert served.family.name == "deepseek-r1"
    assert served.statement.startswith("'coder' is deepseek-r1 by the parser 'deepseek_r1', and")


def test_the_files_win_over_a_name_they_contradict() -> None:
    config = tokens("<s>", "[INST]", "[THINK]", "[/THINK]")
    found = derive("acme/qwen3-flavoured", config, prompt("[INST]"))
    assert found.family == family("magistral")
    assert found.statement == (
        "'acme/qwen3-flavoured' is taken for magistral, whose '[THINK]' and '[/THINK]' are in its tokenizer (its name says qwen3, "
        "but '<think>' and '</think>' are not in its tokenizer or its chat template)"
    )
    found = derive("served", tokens("<|channel>", "<channel|>", "<|think|>"), parser="qwen3")
    assert found.family.name == "gemma-4"
    assert "(the parser 'qwen3' says qwen3, but" in found.statement
    # neither its own markers nor others: nothing of the name's row is kept
    bare = derive("Qwen/Qwen3-8B", tokens("<|im_start|>", "<|im_end|>"), prompt("<|im_start|>assistant\n"))
    assert bare.family == generic()
    assert "its name says qwen3" in bare.statement
    assert "may not think at all; '<think>' and '</think>' are assumed" in bare.statement


def test_plain_text_markers_need_no_token() -> None:
    llama = tokens("<|begin_of_text|>", "<|eot_id|>")
    found = derive("nvidia/Llama-3_1-Nemotron-Ultra-253B-v1", llama, prompt("<|start_header_id|>assistant<|end_header_id|>"))
    assert found.family == family("nemotron")
    assert found.statement.endswith(
        "'<think>' and '</think>' are plain text, which its tokenizer or its chat template need not show"
    )


def test_an_older_version_of_a_family_is_known_by_its_other_pair() -> None:
    found = derive("mistralai/Magistral-Small-2506", tokens("<s>", "[INST]"), "{{ '<think>' + m.thought + '</think>' }}")
    assert found.family.name == "magistral"
    assert found.family.pairs == [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
    assert found.family.special is False
    assert found.family.closing == "</think>"


THOUGHTS = "Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'"
UNKNOWN = [
    (["<s>", "<think>", "</think>"], None, "generic", ("<think>", "</think>")),
    (["<|START_THINKING|>", "<|END_THINKING|>"], None, "generic", ("<|START_THINKING|>", "<|END_THINKING|>")),
    (["<|x:begin_think:x|>", "<|x:end_think:x|>"], "", "generic", ("<|x:begin_think:x|>", "<|x:end_think:x|>")),
    (["<ifm|think>", "</ifm|think>"], None, "generic", ("<ifm|think>", "</ifm|think>")),
    ([], "{{ '<seed:think>' + t + '</seed:think>' }}", "generic", ("<seed:think>", "</seed:think>")),
    # of two pairs the one that the template uses
    (["<think>", "</think>", "[THINK]", "[/THINK]"], "[THINK]x[/THINK]", "magistral", ("[THINK]", "[/THINK]")),
    # markers of several tokens
    (["<|start|>", "<|channel|>", "<|message|>", "<|end|>"], None, "gpt-oss", family("gpt-oss").pairs[0]),
    (["<|open|>", "<|close|>", "<|sep|>"], None, "kimi-k3", family("kimi-k3").pairs[0]),
    (["<s>"], THOUGHTS, "granite-3.2", family("granite-3.2").pairs[0]),
]


@pytest.mark.parametrize(("added", "template", "name", "pair"), UNKNOWN)
def test_an_unknown_model_is_read_from_its_files(added: list[str], template: str | None, name: str, pair: tuple[str, str]) -> None:
    found = derive("acme/model", tokens(*added) if added else None, template)
    assert (found.family.name, found.family.pairs[0]) == (name, pair)
    shown = [file for file, holds in (("its tokenizer", len(added) > 1), ("its chat template", template)) if holds]
    assert f"in {' and '.join(shown)}" in found.statement
    if name == "generic":
        assert "is assumed, and what history keeps is unknown" in found.statement
        assert found.family.history is History.UNKNOWN
        assert found.family.special is bool(added)


def test_nothing_at_all_is_an_assumption_that_says_so() -> None:
    found = derive("acme/model", parser="seed_oss")
    assert found.family.markers == Markers()
    assert (
        found.statement
        == "no markers are known for 'acme/model' and none of its files was read; '<think>' and '</think>' are assumed"
    )
    for config in ({}, {"added_tokens_decoder": None, "chat_template": 3}, {"added_tokens_decoder": ["<think>"]}):
        assert derive("acme/model", config).family == generic()
    # a tool's tags and a control token without a partner are no markers
    tags = tokens("<tool_call>", "</tool_call>", "<|think|>", "<reasoning_effort>")
    assert "its tokenizer shows none" in derive("acme/model", tags).statement


PROMPTS = [
    ("<|im_start|>assistant\n<think>\n", True),
    ("{{ '<|Assistant|>' ~ '<think>' ~ '\\n' }}", True),
    ("{{ '<|im_start|>assistant\\n' }}{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}", False),
    ("{{ '<|assistant|>' }}{{ '</think>' if not enable_thinking else '<think>' }}", None),
    ("{{ '<|assistant|>' }}{% if thinking %}{{ open_tag }}{% else %}{{ close_tag }}{% endif %}", None),
    ("{{ open_tag + close_tag }}", False),
    ("{{ '<|assistant|>' }}", False),
]


@pytest.mark.parametrize(("text", "opened"), PROMPTS)
def test_the_generation_prompt_tells_who_opens_the_block(text: str, opened: bool | None) -> None:
    template = "{% set open_tag = '<think>' %}{% set close_tag = \"</think>\" %}" + STRIPS + prompt(text)
    found = derive("Qwen/QwQ-32B", None, template)
    assert found.family.opened is opened
    assert found.statement.endswith(
        {True: "opens the block", False: "leaves the opening to the model", None: "opens the block as the request asks"}[opened]
    )
    # a template without a generation prompt changes nothing
    assert derive("Qwen/QwQ-32B", None, "{{ '<think>' }}" + STRIPS).family.opened is True


def test_our_own_pair_is_read_from_its_directory() -> None:
    directory = reference_model("target")
    config, template = read(directory)
    found = derive(str(directory), config, template)
    assert found.family.markers == Markers()
    assert found.family.opened is True
    assert found.family.special is True
    assert "found in its tokenizer" in found.statement
    assert derive(str(directory), config, template, parser="deepseek_r1").family.name == "deepseek-r1"


def write(directory: Path, files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return directory


def test_a_directory_is_read_with_what_it_has(tmp_path: Path) -> None:
    assert read(tmp_path) == (None, None)
    assert read(tmp_path / "missing") == (None, None)
    added = [{"id": 7, "content": "<think>", "special": False}, {"id": 8, "content": "</think>", "special": False}]
    write(tmp_path, {"tokenizer.json": {"added_tokens": added}, "chat_template.json": {"chat_template": "old"}})
    assert read(tmp_path) == ({"added_tokens_decoder": {"7": added[0], "8": added[1]}}, "old")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    write(tmp_path, {"tokenizer_config.json": {**tokens("<s>"), "chat_template": named}})
    config, template = read(tmp_path)
    assert template == "usual"
    assert config is not None
    assert list(config["added_tokens_decoder"]) == ["100"]  # the config's own tokens are enough
    write(tmp_path, {"tokenizer_config.json": {"chat_template": named[:1]}})
    assert read(tmp_path)[1] == "tools"
    write(tmp_path, {"chat_template.jinja": "file"})
    assert read(tmp_path)[1] == "file"
    write(tmp_path, {"tokenizer_config.json": "{"})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        read(tmp_path)


class Vocabulary:
    """As much of a tokenizer as vLLM's parsers ask for: a marker or control token is one token, other text one a character."""

    def __init__(self) -> None:
        markers = [text for row in ROWS if row.name != "kimi-k3" for pair in row.pairs for text in pair]
        pieces = [piece for row in ROWS for text in (*row.pairs[0], row.lead) for piece in re.findall(r"<\|\w+\|>", text)]
        known = dict.fromkeys([*markers, *pieces, "[TOOL_CALLS]", "<|tool_calls_section_begin|>"])
        self._ids = {text: i for i, text in enumerate(known, start=0x110000)}
        self._tokens = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))) + "|(?s:.)")

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids[token] if token in self._ids else ord(token) for token in self._tokens.findall(text)]


def vllm_parser(name: str) -> Any:
    """The parser a server with this --reasoning-parser uses, for a request that asks to think."""
    from vllm.reasoning import ReasoningParserManager

    return ReasoningParserManager.get_reasoning_parser(name)(Vocabulary(), chat_template_kwargs={"thinking": True})


@pytest.mark.parametrize(("row", "parser"), PARSED, ids=[f"{row.name}-{parser}" for row, parser in PARSED])
def test_every_row_agrees_with_the_parser_it_names(row: Family, parser: str) -> None:
    found = vllm_parser(parser)
    if parser == "granite":
        assert [*zip(found.valid_think_starts, found.valid_response_starts, strict=True)] == row.pairs[::-1]
    elif parser == "minimax_m2_append_think":
        # it only writes the start marker back into the content
        assert {found.start_token_id, found.end_token_id} == {found.vocab[text] for text in row.pairs[0]}
    elif parser == "openai_gptoss":
        assert (found.reasoning_start_str, found.reasoning_end_str) == (None, None)  # the next test
    else:
        assert (found.reasoning_start_str, found.reasoning_end_str) == row.pairs[0]


@pytest.mark.parametrize("row", [row for row in ROWS if row.parsers], ids=lambda row: row.name)
def test_vllm_takes_the_forced_text_and_sees_its_end_once(row: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--reasoning-config` for vLLM's thinking_token_budget: the end it looks for is at the end of what it forces."""
    from vllm.config import reasoning

    tokenizer = Vocabulary()
    monkeypatch.setattr(reasoning, "cached_tokenizer_from_config", lambda model_config: tokenizer)
    config = reasoning.ReasoningConfig(
        reasoning_parser=row.parser, reasoning_start_str=row.markers.start, reasoning_end_str=row.closing
    )  # fmt: skip
    config.initialize_token_ids(None)
    assert config.enabled
    assert config.reasoning_start_token_ids == tokenizer.encode(row.markers.start)
    forced, end = config.reasoning_end_token_ids, config.natural_reasoning_end_token_ids
    assert forced == tokenizer.encode(row.transition) + tokenizer.encode(row.markers.end) + tokenizer.encode(row.lead)
    if vllm_parser(row.parser).reasoning_end_str is None:
        # a parser without strings: vLLM looks for the whole forced text
        assert end == forced
        return
    assert end == tokenizer.encode(row.markers.end)
    assert [i for i in range(len(forced)) if forced[i : i + len(end)] == end] == [len(tokenizer.encode(row.transition))]


@pytest.mark.parametrize(
    ("close", "channel"),
    [
        (family("gpt-oss").closing, "final"),
        # behind the end marker alone the reasoning is over, but what follows belongs to no message
        (family("gpt-oss").markers.end, None),
        # and this is what the model writes there by itself when it wants to think on
        ("<|end|><|start|>assistant<|channel|>analysis<|message|>", "analysis"),
    ],
)
def test_harmony_closes_where_vllm_sees_the_analysis_end_and_the_answer_begin(close: str, channel: str | None) -> None:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.harmony import HarmonyParser

    def encode(text: str) -> list[int]:
        return get_encoding().encode(text, allowed_special="all")

    trace = encode(family("gpt-oss").markers.start + "2 and 2")
    ids = [*trace, *encode(close), *encode("4")]
    parsed = HarmonyParser(Vocabulary()).process_chunk(ids)
    said = [(segment.channel, segment.delta) for segment in parsed.segments if segment.delta]
    thought, rest = said[: len(encode("2 and 2"))], said[len(encode("2 and 2")) :]
    assert "".join(text for _, text in thought) == "2 and 2"
    assert {name for name, _ in thought} == {"analysis"}
    assert rest == ([(channel, "4")] if channel else [])
    assert parsed.reasoning_token_count == len(thought) + (channel == "analysis")
