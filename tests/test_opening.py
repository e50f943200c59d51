"""Whether a prompt opens a think block: the template's marker does, and a client's own beginning; a quoted one does not."""

from __future__ import annotations

from typing import Any

import pytest

from agentguard.engines.facts import MOST_TAILS, Facts
from agentguard.trace.markers import FAMILIES, generic
from agentguard.trace.opening import ANOTHER, behind, ends_inside, opens, switches, tail
from agentguard.trace.tally import MarkerIds
from tests.scripted import END, START, STOP, USAGE, A, B, Script, chunk, ids_of, text_chunk
from tests.test_guard import ASK, rig, text

NEWLINE = ids_of("\n")
HEADER = [21, 22, 23]
"""What ends the client's turn and begins the assistant's."""
DIRECT = [chunk([], role="assistant"), *[chunk([B], content="w") for _ in range(80)], chunk([STOP], finish="stop"), USAGE]
SECOND = [text_chunk([B, STOP], " a second answer", "stop"), USAGE]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
IDS = MarkerIds((START,), (END,), (END,), blanks=((110,), (110, 110)))


def template(generation: list[int]) -> Any:
    """A template: what was said, a header behind each message, and the generation prompt."""

    def renders(body: dict[str, Any]) -> list[int]:
        said = [token for m in body["messages"] for token in [*ids_of(m.get("content") or ""), *HEADER]]
        if body.get("continue_final_message"):
            return said[: -len(HEADER)]
        return said + (generation if body["add_generation_prompt"] else [])

    return renders


QUOTES = ["what is <think> for?", "<think>", "a <think>\n", "it says </think> and <think>", "<think></think><think>"]


@pytest.mark.parametrize("said", QUOTES)
@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_a_marker_the_client_quotes_opens_nothing(said: str, tools: list[Any]) -> None:
    script = Script(chat=DIRECT, again=DIRECT, complete=SECOND, renders=template([]))
    async with rig(script) as r:
        chunks = await r.step({**ASK, "messages": [{"role": "user", "content": said}], "tools": tools})
        assert text(chunks) == "w" * 80
        assert (r.finished().think_tokens, r.finished().answer_tokens) == (0, 80)
        assert (r.finished().closed, r.finished().continued, r.finished().notes, len(script.seen)) == ("", False, [], 1)


@pytest.mark.parametrize("plugin", [False, True])
async def test_a_stock_server_is_sent_no_budget_that_a_quotation_would_use_up(plugin: bool) -> None:
    """It takes the quoted marker for an open block too. A model that thinks all the same is cut at its cap."""
    quoting = {**ASK, "messages": [{"role": "user", "content": "what is <think> for?"}]}
    thinks = [chunk([START]), *[chunk([A], reasoning="ab"[i % 7 == 0] + "c" * (i % 5)) for i in range(90)], *DIRECT[-2:]]
    script = Script(chat=thinks, complete=SECOND, renders=template([]), plugin=plugin)
    async with rig(script, cutoff={"loops": False}) as r:
        chunks = await r.step(quoting)
        body = script.seen[0][1]
        assert ("thinking_token_budget" in body, "ag_think_tokens" in body["vllm_xargs"]) == (False, plugin)
        if not plugin:
            assert r.guard.engine.facts.budget == "unknown"
            assert (text(chunks), r.finished().closed, r.finished().think_tokens) == (" a second answer", "reserve", 50)
            assert r.finished().notes == []


@pytest.mark.parametrize(("asked", "closed", "think"), [(30, "budget", 30), (None, "", 90)])
async def test_a_budget_that_a_quotation_would_use_up_is_kept_here_with_the_cutoff_off_too(
    asked: int | None, closed: str, think: int
) -> None:
    """The client's own, that is: what it did not ask for is not closed."""
    quoting = {**ASK, "messages": [{"role": "user", "content": "what is <think> for?"}], "thinking_token_budget": asked}
    thinks = [chunk([START]), *[chunk([A], reasoning="a") for _ in range(90)], *DIRECT[-2:]]
    script = Script(chat=thinks, complete=SECOND, renders=template([]))
    async with rig(script, cutoff={"mode": "off"}) as r:
        chunks = await r.step(quoting)
        assert "thinking_token_budget" not in script.seen[0][1]
        assert (r.finished().closed, r.finished().think_tokens) == (closed, think)
        assert text(chunks) == (" a second answer" if closed else "")


async def test_a_budget_that_the_server_refuses_is_kept_here_with_the_cutoff_off_too() -> None:
    thinks = [*[chunk([A], reasoning="a") for _ in range(90)], *DIRECT[-2:]]
    script = Script(chat=thinks, complete=SECOND, refuses=("thinking_token_budget",))
    async with rig(script, cutoff={"mode": "off"}) as r:
        for _ in range(2):  # when it is found out, and when it is known
            assert text(await r.step({**ASK, "thinking_token_budget": 30})) == " a second answer"
            assert (r.finished().closed, r.finished().think_tokens) == ("budget", 30)
        assert script.refused == ["thinking_token_budget"]


@pytest.mark.parametrize("fault", [False, True])
async def test_a_tokenizer_without_an_answer_teaches_nothing_and_lets_no_trace_run_free(fault: bool) -> None:
    asked: list[bool] = []
    answers = False

    def renders(body: dict[str, Any]) -> list[int]:
        if body["messages"] == [ANOTHER]:
            asked.append(answers)
            if not answers and fault:
                raise RuntimeError("scripted")
            if not answers:
                return []
        return template(ids_of("<think>\nOkay, "))(body)  # type: ignore[no-any-return]

    chat = [*[chunk([A], reasoning="a") for _ in range(5)], chunk([END, B], content="b"), chunk([STOP], finish="stop"), USAGE]
    async with rig(Script(chat=chat, renders=renders)) as r:
        for known in (0, 1, 1):
            await r.step()
            assert (r.finished().think_tokens, r.finished().answer_tokens) == (5, 1)
            assert len(r.guard.engine.facts.tails) == known
            answers = True
    assert asked[-3:] == [False, True, True]  # asked again once, and then known


@pytest.mark.parametrize("said", [*QUOTES, "hi"])
@pytest.mark.parametrize("written", ["<think>", "<think>\n", "<think>\n\n", "<think>\nOkay, "])
async def test_a_marker_the_template_writes_opens_a_block_whatever_the_client_quotes(said: str, written: str) -> None:
    chat = [*[chunk([A], reasoning="a") for _ in range(5)], chunk([END, B], content="b"), chunk([STOP], finish="stop"), USAGE]
    script = Script(chat=chat, renders=template(ids_of(written)))
    async with rig(script) as r:
        for _ in range(2):
            await r.step({**ASK, "messages": [{"role": "user", "content": said}], "thinking_token_budget": 20})
            assert (r.finished().think_tokens, r.finished().answer_tokens) == (5, 1)
            # the engine counts from the marker on
            assert script.seen[-1][1]["thinking_token_budget"] == 20 + len(written) - len("<think>")


async def test_a_template_is_asked_once_for_each_of_its_switches() -> None:
    asked: list[Any] = []

    def renders(body: dict[str, Any]) -> list[int]:
        asked.append(body)
        thinks = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        return template(ids_of("<think>\nOkay, ") if thinks else [])(body)  # type: ignore[no-any-return]

    quoting = {**ASK, "messages": [{"role": "user", "content": "<think> is what?"}]}
    script = Script(chat=DIRECT, complete=SECOND, renders=renders)
    async with rig(script) as r:
        for _ in range(3):
            await r.step({**quoting, "chat_template_kwargs": {"enable_thinking": False}})
            assert (r.finished().think_tokens, r.finished().answer_tokens) == (0, 80)
        assert len(asked) == 3 + 2
        await r.step(ASK)  # no quotation, but words behind the template's marker
        assert len(asked) == 5 + 1 + 2
        await r.step(ASK)
        assert len(asked) == 8 + 1


@pytest.mark.parametrize(
    ("content", "inside"),
    [("<think>\nSo far I", True), ("<think>", True), ("So <think>a</think> far", False), ("The answer is", False)],
)
async def test_a_client_s_own_beginning_of_a_trace_is_gone_on_with(content: str, inside: bool) -> None:
    messages = [{"role": "user", "content": "what is <think> for?"}, {"role": "assistant", "content": content}]
    goes_on = [chunk([A], content="x"), *([chunk([END], content="</think>")] if inside else []), chunk([B], content="b")]
    script = Script(chat=[*goes_on, chunk([STOP], finish="stop"), USAGE], renders=template([START]))
    async with rig(script) as r:
        await r.step({**ASK, "messages": messages, "continue_final_message": True, "add_generation_prompt": False})
        assert (r.finished().think_tokens, r.finished().continued) == (int(inside), False)


async def test_the_prompt_that_was_served_is_judged_alike() -> None:
    role = chunk([], role="assistant") | {"prompt_token_ids": [START, 7, *HEADER]}
    async with rig(Script(chat=[role, *DIRECT[1:]], complete=SECOND)) as r:
        assert text(await r.step()) == "w" * 80
        assert r.finished().think_tokens == 0


async def test_a_note_that_repeats_a_quotation_is_no_block_that_was_opened_again() -> None:
    served = chunk([], role="assistant") | {"prompt_token_ids": [START, 7, *HEADER]}
    again = [served, chunk([B], content="b"), chunk([STOP], finish="stop"), USAGE]
    script = Script(chat=[*[chunk([A], reasoning="a")] * 3, chunk([STOP], finish="stop"), USAGE], again=again, carrier="")
    async with rig(script) as r:
        assert text(await r.step({**ASK, "tools": TOOLS})) == "b"
        assert (r.finished().think_tokens, r.finished().answer_tokens) == (3, 1)
        assert "thinks_again" not in r.finished().notes


def test_what_stands_behind_the_marker_decides() -> None:
    assert behind([5, START, 7], IDS) == (7,)
    assert behind([5, START, END], IDS) is None
    assert behind([5, 6], IDS) is None
    assert [opens(rest, IDS, [None, (7, 8)]) for rest in ((), (110,), (110, 110), (7, 8), (7,), (8,))] == [True] * 4 + [False] * 2
    assert tail([9, START, 7, 8], [9], IDS) == (7, 8)
    assert tail([START, 9, 8], [START, 9], IDS) is None  # the template's own words, not its generation prompt


def test_few_switches_are_remembered() -> None:
    facts = Facts()
    for i in range(5 * MOST_TAILS):
        facts.learn_tail(switches({"chat_template_kwargs": {"x": i}}), None)
    assert len(facts.tails) <= MOST_TAILS


@pytest.mark.parametrize(
    ("last", "inside"),
    [
        ({"role": "assistant", "content": [{"type": "text", "text": "<think>a"}]}, True),
        ({"role": "assistant", "content": "", "reasoning": "a"}, True),
        ({"role": "assistant", "content": "a", "reasoning": "a"}, False),
        ({"role": "assistant", "content": None}, False),
        ({"role": "user", "content": "<think>"}, False),
    ],
)
def test_a_beginning_is_the_assistant_s_last_message(last: dict[str, Any], inside: bool) -> None:
    assert ends_inside({"messages": [last], "continue_final_message": True}, generic()) is inside
    assert not ends_inside({"messages": [last]}, generic())


def test_a_beginning_is_known_by_any_marker_of_its_family() -> None:
    body = {"messages": [{"role": "assistant", "content": "Here's my thought process: a"}], "continue_final_message": True}
    assert ends_inside(body, FAMILIES["granite-3.2"])
