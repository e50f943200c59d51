"""Whose session a request belongs to, and the budget it asks for; and the hook that reads both inside LiteLLM."""

from __future__ import annotations

import hashlib
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentguard.errors import ConfigError
from agentguard.identity import CALLER, IDLE_S, RETRY_S, SESSION, Guesses, Identity, guess, identify
from agentguard.think_budget import asked_budget, asked_effort

SYSTEM = "You are an agent. Today's date: 2026-11-30"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "fix it"}]}
ANSWERED = [*CHAT["messages"], {"role": "assistant", "content": "done"}, {"role": "user", "content": "now test"}]


@pytest.mark.parametrize("own", ["h-1", "h-" + "g" * 16, "h-" + "0" * 16 + ".1x", "h-" + "0" * 17])
def test_an_id_of_the_client_s_own_that_looks_a_little_like_a_guess_is_none(own: str) -> None:
    """A guess's limits never stop it."""
    assert not identify({"x-session-id": own}, CHAT).guessed


def test_a_session_without_id_is_known_by_how_it_began() -> None:
    first = identify({}, CHAT)
    assert first.guessed
    later = CHAT | {"messages": ANSWERED}
    assert identify({}, later) == first
    tomorrow = [{"role": "system", "content": SYSTEM.replace("11-30", "12-01")}, *CHAT["messages"][1:]]
    assert identify({}, CHAT | {"messages": tomorrow}) == first
    others = [
        CHAT | {"model": "other"},
        CHAT | {"messages": [CHAT["messages"][0], {"role": "user", "content": "break it"}]},
        CHAT | {"messages": CHAT["messages"][1:]},
    ]
    assert len({first, *(identify({}, other) for other in others), identify({"authorization": "Bearer x"}, CHAT)}) == 5


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "system": SYSTEM, "messages": [{"role": "user", "content": "fix it"}]},
        {"model": "m", "system": [{"type": "text", "text": SYSTEM}], "messages": [{"role": "user", "content": "fix it"}]},
        {"model": "m", "instructions": SYSTEM, "input": "fix it"},
        {"model": "m", "input": [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": [{"text": "fix it"}]}]},
        {
            "model": "m",
            "system": [{"text": "x-anthropic-billing-header: cc_version=2.1"}, {"text": SYSTEM}],
            "messages": [{"role": "user", "content": "<system-reminder>the time is 12:01</system-reminder>\nfix it"}],
        },
    ],
)
def test_the_same_beginning_is_the_same_session_in_every_protocol(body: dict[str, Any]) -> None:
    assert guess(body, "") == guess(CHAT, "")


@pytest.mark.parametrize("piece", ["Mon ", "<system-reminder>", "2026-11-30T", "Monday, 1 ", "1/1/"])
def test_a_prompt_made_to_be_slow_is_not(piece: str) -> None:
    """Four megabytes of it would take hours with a pattern that looks ahead without a bound; a hang fails by the timeout."""
    assert guess({"messages": [{"role": "user", "content": "go " + piece * (4_000_000 // len(piece))}]}, "")


def test_a_task_started_again_is_a_new_session_and_so_is_one_after_a_long_silence() -> None:
    now = 0.0
    guesses = Guesses(limit=2, clock=lambda: now)
    who = identify({}, CHAT)
    later = CHAT | {"messages": ANSWERED}
    complaint = CHAT | {"messages": [*CHAT["messages"], {"role": "user", "content": "no tool was called"}]}
    runs = [guesses.place(who, body) for body in (CHAT, complaint, later, later, CHAT, later)]
    assert [r.session[-2:] for r in runs] == [".1", ".1", ".1", ".1", ".2", ".2"]
    now = IDLE_S + 1
    assert guesses.place(who, later).session.endswith(".3")
    told = Identity("", "told")
    assert guesses.place(told, CHAT) == told
    for other in ("h-" + "1" * 16, "h-" + "2" * 16):
        guesses.place(Identity("", other), CHAT)
    assert guesses.place(who, later).session.endswith(".1")  # forgotten


def test_another_gateway_goes_on_where_this_one_was() -> None:
    here, there = Guesses(clock=lambda: 0.0), Guesses(clock=lambda: 1.0)
    who, later = identify({}, CHAT), CHAT | {"messages": ANSWERED}
    assert here.told(who) == ""
    for _ in range(2):
        here.place(who, CHAT)
    there.learn(who, here.told(who))
    assert there.place(who, later).session.endswith(".2")
    there.learn(who, "not what was told")
    assert there.place(who, CHAT).session.endswith(".3")


def test_a_retry_of_the_first_request_is_no_new_session() -> None:
    """An SDK tries a refused request again within seconds; what was answered and is asked again is another run of the task."""
    now = 0.0
    guesses = Guesses(clock=lambda: now)
    who = identify({}, CHAT)
    guesses.refused(who)  # nothing was placed yet
    for _ in range(3):
        assert guesses.place(who, CHAT).session.endswith(".1")
        guesses.refused(who)
    now = RETRY_S + 1
    assert guesses.place(who, CHAT).session.endswith(".2")
    assert guesses.place(who, CHAT).session.endswith(".3")


@pytest.mark.parametrize(
    ("headers", "body", "session", "agent"),
    [
        ({}, {"metadata": {"user_id": '{"device_id": "d", "session_id": "c0ffee"}'}}, "c0ffee", ""),
        ({}, {"metadata": {"user_id": {"session_id": "c0ffee"}}}, "c0ffee", ""),
        ({}, {"metadata": {"user_id": "user_1_account__session_c0ffee"}}, "c0ffee", ""),
        ({}, {"litellm_metadata": {"session_id": "s"}}, "s", ""),
        ({"baggage": "a=b, session.id=deadbeef;p=1"}, {}, "deadbeef", ""),
        ({"x-session-id": "child", "x-parent-session-id": "parent"}, {}, "parent", "child"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "helper"}, {}, "s", "helper"),
    ],
)
def test_ids_in_a_body_and_agents_within_a_session(headers: Any, body: Any, session: str, agent: str) -> None:
    found = identify(headers, body)
    assert (found.session, found.agent) == (session, agent)


@pytest.mark.parametrize("user", ["{", "plain", '{"session_id": 3}', 7, "{}", "x_session_"])
def test_what_is_no_session_in_a_user_id_is_none(user: Any) -> None:
    assert identify({}, {"metadata": {"user_id": user}}).session.startswith("anonymous-")


@pytest.mark.parametrize(
    ("body", "budget"),
    [
        ({}, (None, False)),
        ({"thinking_token_budget": 5}, (5, False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, (5, True)),
        ({"thinking": {"type": "disabled"}}, (0, True)),
        ({"thinking": {"type": "adaptive"}}, (None, False)),
        ({"chat_template_kwargs": {"reasoning_budget": -1}}, (-1, True)),
    ],
)
def test_a_budget_is_found_wherever_it_is_written(body: dict[str, Any], budget: Any) -> None:
    assert asked_budget(body) == budget


@pytest.mark.parametrize("value", [-2, 1.5, True, "many"])
def test_a_budget_that_is_none_is_refused_by_its_field(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"thinking\.budget_tokens"):
        asked_budget({"thinking": {"budget_tokens": value}})


def test_efforts() -> None:
    assert asked_effort({"reasoning_effort": "low", "reasoning": {"effort": "high"}}) == "low"
    assert asked_effort({"output_config": {"effort": "max"}}) == "max"
    assert asked_effort({"reasoning": {}}) is None


# -- the hook, with LiteLLM's base class in its place; tests/proxy runs it in the real one --------------------------------------


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("fastapi")  # LiteLLM brings it
    names = ("litellm", "litellm.integrations", "litellm.integrations.custom_logger", "litellm.proxy", "litellm.proxy.proxy_server")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["litellm.proxy.proxy_server"].llm_router = SimpleNamespace(get_model_list=_deployments)  # type: ignore[attr-defined]
    sys.modules["litellm.integrations.custom_logger"].CustomLogger = object  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "agentguard.integrations.litellm", raising=False)
    module = importlib.import_module("agentguard.integrations.litellm")
    yield module.hook
    del sys.modules["agentguard.integrations.litellm"]


MODELS = {"local": ["hosted_vllm/qwen"], "claude": ["anthropic/claude-x"], "mixed": ["hosted_vllm/qwen", "openai/gpt"], "": []}


def _deployments(model_name: str) -> list[dict[str, Any]]:
    return [{"litellm_params": {"model": model}} for model in MODELS.get(model_name, ["hosted_vllm/any"])]


def asked(headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    return {**CHAT, **body, "proxy_server_request": {"headers": headers or {}}}


KEY = SimpleNamespace(api_key="hashed-key")


async def test_the_hook_is_a_leaf_class(hook: Any) -> None:
    """LiteLLM looks into vars(cls), so an inherited method would silently never be called."""
    assert "async_pre_call_hook" in vars(type(hook))


async def test_the_hook_adds_who_asks_and_what_may_be_thought_and_nothing_else(hook: Any) -> None:
    data = asked({"x-session-id": "ses_12345678"}, thinking={"type": "enabled", "budget_tokens": 77}, reasoning_effort="low")
    before = dict(data)
    out = await hook.async_pre_call_hook(KEY, None, data, "acompletion")
    assert out["extra_body"] == {"thinking_token_budget": 77, "reasoning_effort": "low"}
    assert out["extra_headers"][SESSION] == "ses_12345678"
    caller = out["extra_headers"][CALLER]
    assert caller == hashlib.sha256(b"0:hashed-key").hexdigest()[:12]
    assert {k: v for k, v in out.items() if k not in ("extra_body", "extra_headers")} == before


@pytest.mark.parametrize(
    ("model", "call", "acts"),
    [
        ("local", "acompletion", True),
        ("hosted_vllm/named", "aresponses", True),
        ("local", "anthropic_messages", True),
        ("claude", "acompletion", False),
        ("mixed", "acompletion", False),
        ("local", "aembedding", False),
        ("", "acompletion", False),
    ],
)
async def test_other_providers_and_other_calls_are_left_alone(hook: Any, model: str, call: str, acts: bool) -> None:
    """In somebody else's proxy: their models get neither our fields nor anybody's ids."""
    data = asked({"x-session-id": "ses_1"}, thinking={"type": "enabled", "budget_tokens": 7}) | {"model": model}
    before = dict(data)
    out = await hook.async_pre_call_hook(KEY, None, data, call)
    assert (out != before) == acts


async def test_nothing_asked_leaves_no_empty_field(hook: Any) -> None:
    assert "extra_body" not in await hook.async_pre_call_hook(KEY, None, asked(), "acompletion")
    odd = await hook.async_pre_call_hook(KEY, None, asked(reasoning_effort="low") | {"extra_body": "x"}, "acompletion")
    assert odd["extra_body"] == "x"


async def test_callers_without_a_key_are_told_apart(hook: Any) -> None:
    """With JWT LiteLLM has a user and no key."""
    found = set()
    for who in (
        {"user_id": "ann"},
        {"user_id": "bob"},
        {"team_id": "ann"},
        {"end_user_id": "ann"},
        {"user_id": "ann", "team_id": "x"},
    ):
        data = await hook.async_pre_call_hook(
            SimpleNamespace(api_key=None, **who), None, asked({"x-session-id": "s"}), "acompletion"
        )
        found.add(data["extra_headers"][CALLER])
    assert len(found) == 5


async def test_two_callers_with_one_session_id_are_two_at_the_gateway(hook: Any) -> None:
    found = []
    for key in ("one", "two", None):
        data = await hook.async_pre_call_hook(SimpleNamespace(api_key=key), None, asked({"x-session-id": "same"}), "acompletion")
        found.append(identify({"authorization": "Bearer proxy", **data["extra_headers"]}, data))
    assert [f.session for f in found] == ["same"] * 3
    assert len(set(found)) == 3


async def test_a_client_cannot_say_whose_session_it_is(hook: Any) -> None:
    lie = {CALLER: "someone-else", "X-AgentGuard-Caller": "someone-else", "x-session-id": "same"}
    data = asked(lie) | {"headers": dict(lie), "extra_headers": {"X-Agentguard-Caller": "someone-else", "x-kept": "1"}}
    out = await hook.async_pre_call_hook(KEY, None, data, "acompletion")
    sent = {k.lower(): v for k, v in {**out["headers"], **out["extra_headers"]}.items()}
    assert sent[CALLER] != "someone-else"
    assert sent["x-kept"] == "1"
    assert "someone-else" not in str(out["headers"]) + str(out["extra_headers"])


async def test_a_client_s_own_extra_body_wins(hook: Any) -> None:
    data = asked(thinking_token_budget=5) | {"extra_body": {"thinking_token_budget": 9, "top_k": 3}}
    out = await hook.async_pre_call_hook(KEY, None, data, "aresponses")
    assert out["extra_body"] == {"thinking_token_budget": 9, "top_k": 3}


async def test_without_an_id_the_hook_guesses(hook: Any) -> None:
    out = await hook.async_pre_call_hook(KEY, None, asked(), "anthropic_messages")
    assert out["extra_headers"][SESSION].startswith("h-")
    assert identify(out["extra_headers"], out).guessed


async def test_a_refusal_keeps_its_words_and_its_retry_after(hook: Any) -> None:
    said = 'litellm.RateLimitError: X - {"error":{"message":"session \\"a\\" is stopped; raise the limit","type":"t"}}'
    error = Exception(said)
    error.status_code, error.litellm_response_headers = 429, {"retry-after": "60", "x-other": "1"}  # type: ignore[attr-defined]
    for model in ("claude", "mixed", ""):  # no affair of ours
        assert await hook.async_post_call_failure_hook({"model": model}, error, KEY) is None
    ours = {"model": "local"}
    told = await hook.async_post_call_failure_hook(ours, error, KEY)
    assert (told.status_code, told.detail, told.headers) == (429, 'session "a" is stopped; raise the limit', {"retry-after": "60"})
    assert await hook.async_post_call_failure_hook(ours, Exception("in the middle of a stream"), KEY) is None
