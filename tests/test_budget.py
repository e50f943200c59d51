"""The engine's think budget as pure bookkeeping: simulated rounds of drafting and verification, then the row layout on tensors."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentguard.request_ids import client_id
from engine_plugins.vllm.budget import Budget, BudgetHolder, Closing
from engine_plugins.vllm.phase import PhaseTracker, ThinkMarkers

START, END, OTHER = 1, 2, tuple(range(10, 16))
ONE = ThinkMarkers((START,), (END,))
MANY = ThinkMarkers((1, 3), (2, 4, 5))


class Engine:
    """Rounds as vLLM runs them: a forced row yields its token, any other row the draft or a token of the model's own."""

    def __init__(self, rng: random.Random, budget: Budget, markers: ThinkMarkers, natural_end: float) -> None:
        self.rng, self.budget, self.markers, self.natural_end = rng, budget, markers, natural_end
        self.output: list[int] = []
        self.forced_at: list[int] = []

    def token(self) -> list[int]:
        draw = self.rng.random()
        if draw < self.natural_end:
            return list(self.markers.end if self.rng.random() < 0.5 else self.markers.start)
        return [self.rng.choice(OTHER)]

    def tokens(self, n: int) -> list[int]:
        out: list[int] = []
        while len(out) < n:
            out += self.token()
        return out[:n]

    def round(self) -> None:
        self.budget.update(self.output)
        drafts = self.tokens(self.rng.randint(0, 6))
        if self.rng.random() < 0.3:  # a drafter that has learnt the close
            text = [*self.budget.closing.before, *self.budget.closing.end, *self.budget.closing.after]
            drafts = (drafts[: self.rng.randint(0, 2)] + text)[: len(drafts)]
        forced = self.budget.forced(drafts)
        mine = self.tokens(1)[0]
        for row in range(len(drafts) + 1):
            said = forced.get(row, drafts[row] if row < len(drafts) and self.rng.random() < 0.7 else mine)
            if row in forced:
                self.forced_at.append(len(self.output))
            self.output.append(said)
            if row < len(drafts) and said != drafts[row]:
                return


def blocks(prompt: list[int], output: list[int], markers: ThinkMarkers) -> list[tuple[int, int, bool]]:
    """(first, last + 1, closed) positions in ``output`` of each block's tokens, by definition and not incrementally."""
    text = [*prompt, *output]
    found, begin, i = [], None, 0
    start, end = list(markers.start), list(markers.end)
    while i < len(text):
        if begin is None and text[i : i + len(start)] == start:
            i += len(start)
            begin = i
        elif begin is not None and text[i : i + len(end)] == end:
            found.append((begin - len(prompt), i - len(prompt), True))
            i += len(end)
            begin = None
        else:
            i += 1
    if begin is not None:
        found.append((begin - len(prompt), len(output), False))
    return [b for b in found if b[1] >= 0]


@pytest.mark.parametrize("markers", [ONE, MANY])
@pytest.mark.parametrize("before", [(), (20, 21)])
@pytest.mark.parametrize("seed", range(60))
def test_every_block_is_closed_exactly_at_its_limit(seed: int, before: tuple[int, ...], markers: ThinkMarkers) -> None:
    rng = random.Random(f"{seed}/{before}/{markers}")
    prompt = [7, *markers.start, 8, 8] if rng.random() < 0.7 else [7]
    limit = rng.randint(0, 25)
    closing = Closing(before, markers.end, ())
    engine = Engine(rng, Budget(PhaseTracker(markers, prompt), closing, a_block=limit), markers, rng.choice((0.0, 0.05)))
    for _ in range(40):
        engine.round()
    for first, last, closed in blocks(prompt, engine.output, markers):
        given = max(0, -first)
        written = [*engine.output[max(0, first) : last]]
        allowed = max(limit, given)
        own = len(written) + given
        if not closed:
            assert own <= allowed + len(before) + len(markers.end), (first, last)
        elif own > allowed:
            assert own == allowed + len(before)
            assert written[len(written) - len(before) :] == list(before)
        # else the model closed it by itself
    # what was forced lies in a close, never anywhere else
    legal = {
        at
        for first, last, closed in blocks(prompt, engine.output, markers)
        for at in range(max(0, first, last - len(before) - (0 if closed else len(markers.end))), last + len(markers.end))
    }
    assert set(engine.forced_at) <= legal


@pytest.mark.parametrize("seed", range(80))
def test_a_limit_set_meanwhile_holds_from_the_next_round_for_all_blocks_together(seed: int) -> None:
    rng = random.Random(seed)
    budget = Budget(PhaseTracker(ONE, [START, 9]), Closing((20,), (END,), ()))
    engine = Engine(rng, budget, ONE, 0.03)
    for _ in range(rng.randint(1, 6)):
        engine.round()
    assert not engine.forced_at
    budget.update(engine.output)
    at, thought, wanted = len(engine.output), budget.phase.think, rng.randint(0, 60)
    budget.set_total(wanted)
    for _ in range(30):
        engine.round()
    spans = blocks([START, 9], engine.output, ONE)
    model_chosen = sum(sum(1 for i in range(max(0, first), last) if i not in set(engine.forced_at)) for first, last, _ in spans)
    assert model_chosen <= max(wanted, thought)
    if engine.forced_at:
        assert engine.forced_at[0] >= at
        assert model_chosen == max(wanted, thought)


def test_a_close_that_has_begun_is_carried_through() -> None:
    budget = Budget(PhaseTracker(ONE, [START]), Closing((20, 21, 22), (END,), ()), total=2)
    budget.update([10, 10, 20])
    budget.set_total(100)
    assert budget.forced([21, 22, END]) == {0: 21, 1: 22, 2: END}
    budget.update([10, 10, 20, 21, 22, END])
    assert not budget.limited or budget.forced([10, 10]) == {}
    assert budget.phase.think == 5


def test_what_must_follow_the_marker_is_forced_after_a_forced_close_only() -> None:
    closing = Closing.of((20, END, 30, 31), (END,))
    assert closing == Closing((20,), (END,), (30, 31))
    budget = Budget(PhaseTracker(ONE, [START]), closing, total=1)
    assert budget.forced([10, 20, END, 30, 31, 12]) == {1: 20, 2: END, 3: 30, 4: 31}
    budget.update([10, 20, END, 30])
    assert budget.forced([99]) == {0: 31}
    budget.update([10, 20, END, 30, 31])
    assert budget.forced([99]) == {}
    natural = Budget(PhaseTracker(ONE, [START]), closing, total=50)
    natural.update([10, END])
    assert natural.forced([12]) == {}


def test_forced_text_without_the_marker_is_a_transition() -> None:
    assert Closing.of((5, 6), (END,)) == Closing((5, 6), (END,), ())


@pytest.mark.parametrize(
    ("engine_id", "client"),
    [
        ("chatcmpl-abc12345-0123abcd", "abc12345"), ("cmpl-abc12345-0-0123abcd", "abc12345"), ("abc12345", "abc12345"),
        ("chatcmpl-a-b-7-0123abcd", "a-b-7"), ("0_chatcmpl-abc12345-0123abcd", "abc12345"), ("chatcmpl-x", "chatcmpl-x"),
    ],
)  # fmt: skip
def test_a_request_is_known_by_the_id_its_client_gave(engine_id: str, client: str) -> None:
    assert client_id(engine_id) == client


class Runner:
    """The parts of vLLM's V1 model runner the holder reads."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], req_id_to_index={})

    def add(self, req_id: str, prompt: list[int], *, budget: int | None = None, extra: dict[str, Any] | None = None) -> list[int]:
        params = SimpleNamespace(thinking_token_budget=budget, extra_args=extra)
        self.requests[req_id] = SimpleNamespace(prompt_token_ids=prompt, output_token_ids=[], sampling_params=params)
        self.input_batch.req_ids.append(req_id)
        self.place()
        return self.requests[req_id].output_token_ids  # type: ignore[no-any-return]

    def place(self) -> None:
        self.input_batch.req_id_to_index = {r: i for i, r in enumerate(self.input_batch.req_ids)}


def holder() -> tuple[Runner, BudgetHolder]:
    runner = Runner()
    return runner, BudgetHolder(runner, ONE, Closing((), (END,), ()))


ADDED = SimpleNamespace(added=[object()], removed=[], moved=[])


def rows(made: BudgetHolder, n: int, *, bonus: bool, drafts: list[list[int]] | None) -> list[int]:
    logits = made.apply_to_logits(torch.zeros(n, 32), bonus, drafts)
    return [i for i in range(n) if logits[i, END] == 1e9]


def test_draft_rows_bonus_rows_and_batches_without_drafts() -> None:
    runner, made = holder()
    for i, budget in enumerate((2, None, 3, 0)):
        runner.add(f"r{i}", [START], budget=budget)
    made.sync_batch(ADDED)
    drafts: list[list[int]] = [[10, 10, 10], [10, 10], [10, 10, 10], []]
    made.update_state([], drafts)
    assert rows(made, 4, bonus=True, drafts=drafts) == [2, 3]  # r2 behind its three drafts, r3 at once
    assert rows(made, 8, bonus=False, drafts=drafts) == [2]  # r0 behind two
    empty: list[list[int]] = [[], [], [], []]
    made.update_state([], empty)
    assert rows(made, 4, bonus=False, drafts=empty) == [3]
    assert rows(made, 4, bonus=False, drafts=None) == [3]
    assert rows(made, 0, bonus=False, drafts=empty) == []  # a verification without any draft


def test_stock_writes_a_batch_without_drafts_into_its_first_row() -> None:
    """Why the holder is replaced. When this fails, vLLM has mended it: the sentence in budget.py goes."""
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    config = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=[END])
    stock = ThinkingBudgetStateHolder(config, 8, 3, torch.device("cpu"), False)
    params = SimpleNamespace(thinking_token_budget=0)
    stock.sync_batch(SimpleNamespace(added=[(i, params, [START], []) for i in range(3)], removed=[], moved=[]))
    empty: list[list[int]] = [[], [], []]
    stock.update_state(empty, empty)
    logits = stock.apply_to_logits(torch.zeros(3, 32), False, empty)
    assert [i for i in range(3) if logits[i, END] == 1e9] == [0]


def test_a_request_admitted_without_a_budget_can_be_closed_and_a_preempted_one_stays_closed() -> None:
    runner, made = holder()
    output = runner.add("chatcmpl-abcdefgh-0123abcd", [START])
    made.sync_batch(ADDED)
    assert not made.has_tracked_requests()
    output += [10, 11, 12]
    assert made.set_total("abcdefgh", 5) == {"found": True, "think": 3, "inside": True, "total": 5}
    assert made.has_tracked_requests()
    made.update_state([], [[10, 10, 10]])
    assert rows(made, 3, bonus=False, drafts=[[10, 10, 10]]) == [2]
    # preempted: out of the batch, still known to the runner
    runner.input_batch.req_ids.clear()
    runner.place()
    other = runner.add("zzz", [START])
    made.sync_batch(ADDED)
    made.update_state([], [[10]])
    assert rows(made, 1, bonus=False, drafts=[[10]]) == []
    runner.input_batch.req_ids.append("chatcmpl-abcdefgh-0123abcd")
    runner.place()
    made.sync_batch(ADDED)
    output += [10, 11]
    other += [10]
    made.update_state([], [[10], [10]])
    assert rows(made, 2, bonus=False, drafts=[[10], [10]]) == [1]
    for stranger in ("nobody12", "chatcmpl", "abcdefg"):
        assert made.set_total(stranger, 5) == {"found": False}


def test_an_id_used_again_is_a_new_request() -> None:
    runner, made = holder()
    output = runner.add("r", [START], budget=2)
    made.sync_batch(ADDED)
    output += [10, 10, END, 12]
    made.update_state([], [[]])
    del runner.requests["r"]
    runner.input_batch.req_ids.clear()
    runner.add("r", [START], extra={"ag_think_tokens": 0})
    made.sync_batch(ADDED)
    made.update_state([], [[]])
    assert rows(made, 1, bonus=False, drafts=[[]]) == [0]
