"""What does not fit into the window: a limit that is too large is lowered and asked again, a prompt that is too long is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentguard.errors import ContextLengthError, EngineRequestError
from agentguard.events import CompactionAdvised, StepFinished, StepStarted
from agentguard.middleware import Reply
from agentguard.overflow import TRIES, Fit, digest, is_overflow, prompt_told, refit, smaller, window_told
from agentguard.telemetry.metrics import Metrics
from tests.scripted import Script
from tests.test_faults import stored
from tests.test_guard import ASK, ME, THINKS_AND_ANSWERS, rig, text

WORDS: list[tuple[str, int | None, bool]] = [
    # the words, the prompt's tokens in them, whether a lower limit may help (window 1000, limit 900)
    (("This model's maximum context length is 1000 tokens. However, you requested 1200 tokens (300 in the messages, 900 in the "
     "completion). Please reduce the length of the messages or completion."), 300, True),
    (("'max_tokens' or 'max_completion_tokens' is too large: 900. This model's maximum context length is 1000 tokens and your "
     "request has 300 input tokens (900 > 1000 - 300)."), 300, True),
    ("max_tokens=1200 cannot be greater than max_model_len=1000. Please request fewer output tokens.", None, True),
    (("This model's maximum context length is 1000 tokens. However, your prompt contains at least 1001 input tokens, which exceeds "
     "this limit even without any output tokens. Please reduce the length of the input prompt."), 1001, False),
    (("This model's maximum context length is 1000 tokens. However, your prompt contains 9000 characters (more than 8000 "
     "characters, which is the upper bound for 1000 input tokens). Please reduce the length of the input prompt."), None, False),
    (("The decoder prompt (length 1100) is longer than the maximum model length of 1000. Make sure that `max_model_len` is no "
     "smaller than the number of text tokens."), 1100, False),
    (("Requested token count exceeds the model's maximum context length of 1000 tokens. You requested a total of 1200 tokens: 300 "
     "tokens from the input messages and 900 tokens for the completion."), 300, True),
    ("The input (1700 tokens) is longer than the model's context length (1000 tokens).", 1700, False),
    ("Input length (1600 tokens) exceeds the maximum allowed length (1000 tokens).", 1600, False),
    ("the request exceeds the available context size. try increasing the context size or enable context shift", None, False),
    ("request (1400 tokens) exceeds the available context size (1000 tokens), try increasing it", 1400, False),
    (("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 1000. Given: 300 `inputs` tokens and 900 "
     "`max_new_tokens`"), 300, True),
    ("max_tokens is too large: 900. This model supports at most 400 completion tokens, whereas you provided 900.", None, True),
]  # fmt: skip


@pytest.mark.parametrize(("said", "prompt", "helps"), WORDS)
def test_each_servers_words_are_understood(said: str, prompt: int | None, helps: bool) -> None:
    assert is_overflow(EngineRequestError(400, said))
    assert not is_overflow(EngineRequestError(500, said))
    assert prompt_told(said) == prompt
    assert window_told(said) == (1000 if "1000" in said else None)
    fit = refit(said, Fit(), window=1000, sent=900, least=64, margin=8)
    if not helps:
        assert fit is None
    else:
        assert fit == Fit(prompt, 692 if prompt else 450, 1)


def test_other_refusals_are_none_of_the_window() -> None:
    for said in ("max_tokens must be at least 1, got 0", "temperature is too large", "unknown field 'context'", "scripted refusal"):
        assert not is_overflow(EngineRequestError(400, said))


def test_limits_go_down_until_nothing_useful_is_left_and_never_for_ever() -> None:
    says = "max_tokens is too large"
    fit, sent, tried = Fit(), 1 << 20, []
    while (lower := refit(says, fit, window=1 << 21, sent=sent, least=64, margin=8)) is not None:
        assert lower.most is not None
        assert lower.most < sent
        fit, sent = lower, lower.most
        tried.append(sent)
    assert len(tried) == TRIES
    # the server's own window is smaller than ours, and it does not say so: what it leaves by our reckoning was refused already
    says = "max_tokens is too large beside the 300 in the messages"
    assert refit(says, Fit(), window=1000, sent=400, least=64, margin=8) == Fit(300, 200, 1)
    assert refit("max_tokens is too large", Fit(), window=1000, sent=1 << 20, least=64, margin=8) == Fit(None, 500, 1)
    assert refit("too large: max_tokens", Fit(), window=1000, sent=100, least=64, margin=8) is None
    assert refit("maximum context length, max_tokens", Fit(), window=1000, sent=None, least=64, margin=8) is None


def test_a_digest_is_of_one_model_and_one_window() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 1}
    same = digest(body, "m", 1000)
    assert digest({**body, "temperature": 0, "metadata": {"n": 1}}, "m", 1000) == same
    others = [digest(body, "m", 2000), digest(body, "n", 1000), digest({**body, "max_tokens": 6}, "m", 1000)]
    others.append(digest({**body, "chat_template_kwargs": {"enable_thinking": False}}, "m", 1000))
    assert len({same, *others}) == 5


def limits_of(script: Script) -> list[Any]:
    return [body.get("max_tokens") for path, body, _ in script.seen if path.endswith("chat/completions")]


@pytest.mark.parametrize(("prompt", "sent"), [(300, [20_000, 500 - 300 - 8]), (550, [20_000])])
async def test_a_window_that_the_server_names_counts_where_it_is_smaller(prompt: int, sent: list[int]) -> None:
    script = Script(chat=checking(prompt, 500), window=32_768, tokenizes=False)
    async with rig(script) as r:
        if len(sent) == 2:
            assert text(await r.step({**ASK, "max_tokens": 20_000})) == "bb"
        else:
            for told in (r"550 tokens.*window of 500 tokens \(0 are left", "too long.*window of 500 tokens"):
                with pytest.raises(ContextLengthError, match=told):
                    await r.step({**ASK, "max_tokens": 20_000})
        assert limits_of(script) == sent


def test_a_smaller_window_asks_for_less_and_the_server_s_word_cannot_raise_ours() -> None:
    says = "maximum context length is {} tokens, 300 in the messages"
    for told, window in ((500, 500), (2000, 1000)):
        room = window - 300 - 8
        assert window_told(says.format(told)) == told
        assert smaller(1000, says.format(told)) == window
        assert refit(says.format(told), Fit(), window=window, sent=900, least=64, margin=8) == Fit(300, room, 1)


async def test_an_attempt_with_a_limit_too_large_is_told_to_nobody_as_a_step() -> None:
    metrics, reply = Metrics(), Reply()
    script = Script(chat=checking(850), tokenizes=False)
    async with rig(script) as r:
        with r.guard.hub.sink(metrics.observe):
            chunks = [c async for c in r.guard.stream({**ASK, "max_tokens": 900}, ME, reply=reply)]
        assert (text(chunks), len(limits_of(script))) == ("bb", 2)
        first, second = [e for e in r.events if isinstance(e, StepFinished)]
        assert (first.undone, second.undone, second.error) == (True, False, "")
        assert [type(e) for e in reply.events] == [StepStarted, CompactionAdvised, StepFinished]
        assert reply.request == second.request != first.request
        assert len([e for e in r.events if isinstance(e, CompactionAdvised)]) == 1
        assert not r.guard.running
        assert not r.guard.begun
    lines = metrics.render().decode().splitlines()
    assert [line for line in lines if line.startswith("agentguard_requests_total")] == [
        'agentguard_requests_total{outcome="answered"} 1.0'
    ]
    assert "agentguard_prompt_tokens_total 3.0" in lines
    assert not [line for line in lines if line.startswith("agentguard_errors_total")]


@pytest.mark.parametrize("tokenizes", [True, False])
async def test_a_limit_as_large_as_the_window_is_clamped(tokenizes: bool) -> None:
    """With the prompt's count or with an estimate of it, as docs/agents.md promises."""
    script = Script(chat=list(THINKS_AND_ANSWERS), tokenizes=tokenizes)
    async with rig(script) as r:
        for _ in range(2):
            assert text(await r.step({**ASK, "max_tokens": 1000})) == "bb"
        assert [limit < 1000 - 3 for limit in limits_of(script)] == [True, True]
        assert min(limits_of(script)) > 900


def checking(prompt: int, window: int = 1000) -> Any:
    """A server that checks prompt and limit as vLLM did, and tells both."""

    def chat(body: dict[str, Any]) -> Any:
        asked = body.get("max_tokens", 0)
        if prompt + max(1, asked) <= window:
            return list(THINKS_AND_ANSWERS)
        said = (
            f"This model's maximum context length is {window} tokens. However, you requested {prompt + asked} tokens ({prompt} in "
            f"the messages, {asked} in the completion). Please reduce the length of the messages or completion."
        )
        return [{"error": {"message": said, "code": 400}}]

    return chat


async def test_a_limit_too_large_beside_a_prompt_longer_than_estimated_is_lowered_and_nothing_is_remembered() -> None:
    script = Script(chat=checking(700), tokenizes=False)
    async with rig(script, limits={"steps": 3}) as r:
        for n in range(3):
            script.seen.clear()
            assert text(await r.step({**ASK, "max_tokens": 900})) == "bb"
            assert limits_of(script) == [900, 1000 - 700 - 8]
            assert (r.finished().step, r.started().budget, r.started().prompt_tokens) == (n + 1, 292, 700)
        (session,) = r.guard.sessions
        assert not session.overflowed
        assert (session.steps_started, session.idle) == (3, 0)  # a refused limit is no step


async def test_a_prompt_too_long_is_refused_with_its_tokens_and_not_sent_again() -> None:
    script = Script(chat=checking(990), tokenizes=False)
    async with rig(script) as r:
        with pytest.raises(ContextLengthError, match=r"990 tokens.*window of 1000 tokens \(2 are left"):
            await r.step()
        with pytest.raises(ContextLengthError, match="window of 1000 tokens"):
            await r.step()
        assert limits_of(script) == [100]
        with pytest.raises(ContextLengthError):  # another prompt, or another limit, is another request
            await r.step({**ASK, "max_tokens": 99})
        assert limits_of(script) == [100, 99]


async def test_what_did_not_fit_is_asked_again_after_a_restart_with_a_larger_window(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 's.db'}"
    for window in (1000, 100_000):
        script = Script(chat=checking(2000, window), window=window, tokenizes=False)
        async with stored(script, url) as r:
            for _ in range(3):
                if window == 1000:
                    with pytest.raises(ContextLengthError):
                        await r.step()
                else:
                    assert text(await r.step()) == "bb"
        assert len(limits_of(script)) == (1 if window == 1000 else 3)
