"""The trainer's decisions: when to learn, what a new epoch forgets, when to go back, and when to stop."""

from __future__ import annotations

import pytest
import torch

from agentguard.tts_settings import TtsSettings
from engine_plugins.tts import wire
from engine_plugins.tts.capture import REQUESTS
from engine_plugins.tts.judge import LEAST, MEMORY, PAY_LEAST, Action, Judge, overhead
from engine_plugins.tts.layout import Packed
from engine_plugins.tts.loss import Rows
from engine_plugins.tts.trainer import Trainer
from engine_plugins.tts.twin import Twin
from tests.tts_rows import K, V, round_frame, small_draft


def trainer(**knobs: object) -> Trainer:
    settings = TtsSettings.parse({"min_tokens": 0, "stride": 5, **knobs})
    return Trainer(Twin(small_draft(), settings), settings, K)


def frame(number: int, *, epoch: int = 1, request: str = "r", output: int = 100, pack: wire.Laws | None = None) -> wire.Frame:
    start = 40 + 3 * number
    row = round_frame(start, 2, request=request, since=start - 3 if number else 0, output=output, seed=number, pack=pack)
    return wire.Frame(epoch, 0, 10.0, 0, [row])


def test_it_learns_every_stride_rounds() -> None:
    learner = trainer(stride=4)
    due = []
    for number in range(12):
        learner.feed(frame(number))
        due.append(learner.due)
        if learner.due:
            action, why, update = learner.train()
            assert (action, why) == (Action.GO_ON, "")
            assert update is not None
            assert update.rows == 3 * (number + 1)
    assert due == [(n + 1) % 4 == 0 for n in range(12)]
    assert learner.updates == 3


def test_rounds_that_came_meanwhile_are_learned_in_one_update() -> None:
    learner = trainer(stride=2)
    for number in range(9):
        learner.feed(frame(number))
    learner.train()
    assert not learner.due


def test_a_short_request_is_not_learned_from() -> None:
    learner = trainer(min_tokens=100)
    for number in range(30):
        learner.feed(frame(number, output=3 * number))
        assert not learner.due
    for number in range(30, 45):
        learner.feed(frame(number, output=3 * number))
    assert learner.due


def test_a_new_epoch_starts_from_the_weights_of_the_start() -> None:
    learner = trainer(rate=1e-2)
    before = {n: t.clone() for n, t in learner.twin.payload().items()}
    for number in range(20):
        learner.feed(frame(number))
        if learner.due:
            learner.train()
    assert any(not torch.equal(before[n], t) for n, t in learner.twin.payload().items())
    learner.feed(frame(0, epoch=2, request="s"))
    assert list(learner.sequences) == ["s"]
    assert all(torch.equal(before[n], t) for n, t in learner.twin.payload().items())
    assert not learner.due


def test_requests_of_a_batch_are_learned_together_and_bounded() -> None:
    learner = trainer()
    for name in range(3 * REQUESTS):
        learner.feed(frame(0, request=f"r{name}"))
    assert len(learner.sequences) == REQUESTS
    _, _, update = learner.train()
    assert update is not None
    assert update.rows == 3 * REQUESTS


def test_a_request_that_has_ended_is_not_learned_from_again() -> None:
    learner = trainer(stride=2)
    for number in range(4):
        learner.feed(frame(number, request="a"))
    for number in range(20):
        learner.feed(frame(number, request="b"))
    _, _, update = learner.train()
    assert update is not None
    assert update.rows == 3 * 20
    assert list(learner.sequences) == ["a", "b"]


def test_rows_of_nan_are_dropped_and_counted() -> None:
    learner = trainer()
    broken = wire.Laws.pack(Rows(torch.full((K, V), torch.nan)), None)
    for number in range(6):
        learner.feed(frame(number, pack=broken))
    assert learner.train() == (Action.GO_ON, "", None)
    assert learner.dropped_rows == 6 * K
    assert learner.updates == 0


class Spoilt(Twin):
    """A twin whose live laws are said to be uniform, and whose frozen ones are the target's."""

    def log_laws(self, packed: Packed, *, frozen: bool) -> torch.Tensor:
        return packed.target.logp if frozen else torch.full_like(packed.target.logp, 1 / V).log()


def test_it_goes_back_when_the_learned_draft_is_worse_and_stops_at_the_third_time() -> None:
    settings = TtsSettings.parse({"min_tokens": 0, "stride": 1, "rate": 1e-2, "window": 64})
    twin = Spoilt(small_draft(), settings)
    learner = Trainer(twin, settings, K)
    seen: list[Action] = []
    for number in range(400):
        learner.feed(frame(number))
        if learner.due:
            action, why, update = learner.train()
            if action is not Action.GO_ON:
                seen.append(action)
                assert "overlaps the target" in why
                assert update is None
                assert all(torch.equal(twin.base[n], p) for n, p in twin.trained.items())
    assert seen == [Action.ROLL_BACK, Action.ROLL_BACK, Action.STOP]
    assert "for the 3rd time" in learner.stopped
    assert not learner.due
    learner.feed(frame(0, epoch=2))
    assert learner.stopped == ""


def test_equal_weights_are_judged_equal_far_into_a_request() -> None:
    """Live and frozen are looked at on the same window, so a window that is too short for the draft favours neither."""
    learner = trainer(rate=1e-9, stride=1, window=32)
    for number in range(300):
        learner.feed(frame(number))
        if learner.due:
            learner.train()
    at = learner.judge.standing(0.0)
    assert at.rounds > 50
    assert at.gain == pytest.approx(1, abs=1e-4)


def judged(live: float, frozen: float, n: int, *, noise: float = 0.05) -> Judge:
    judge, generator = Judge(6), torch.Generator().manual_seed(1)
    for _ in range(n):
        wobble = float(torch.randn((), generator=generator)) * noise
        judge.add(live + wobble, frozen)
    return judge


@pytest.mark.parametrize(
    ("live", "frozen", "n", "cost", "action"),
    [
        (0.6, 0.4, 300, 0.1, Action.GO_ON),
        (0.4, 0.4, LEAST - 1, 9.0, Action.GO_ON),  # too early for any verdict
        (0.3, 0.4, 100, 0.0, Action.ROLL_BACK),
        (0.41, 0.4, 300, 0.5, Action.STOP),  # a gain of 1 % against a cost of half a round
        (0.41, 0.4, PAY_LEAST - 1, 0.5, Action.GO_ON),
        (0.4, 0.4, 300, 0.0, Action.GO_ON),  # no change, and nothing to pay
    ],
)
def test_verdicts(live: float, frozen: float, n: int, cost: float, action: Action) -> None:
    found, why = judged(live, frozen, n).decide(cost, auto_off=True)
    assert found is action
    assert bool(why) == (action is not Action.GO_ON)


def test_auto_off_can_be_off() -> None:
    assert judged(0.41, 0.4, 300).decide(0.5, auto_off=False) == (Action.GO_ON, "")


def test_the_reason_says_gain_and_break_even() -> None:
    _, why = judged(0.41, 0.4, 300).decide(0.5, auto_off=True)
    assert "below the break-even of 1.500" in why


def test_a_draft_that_did_not_change_is_rarely_rolled_back() -> None:
    """200 requests of 500 rounds whose live and frozen overlaps differ by noise only; neighbours are correlated."""
    generator = torch.Generator().manual_seed(3)
    wrong = 0
    for _ in range(200):
        judge, wobble = Judge(6), 0.0
        noise = torch.randn(500, generator=generator).tolist()
        for i, value in enumerate(noise):
            wobble = 0.3 * wobble + value
            judge.add(0.5 + 0.05 * wobble, 0.5)
            if i % 20 == 19 and judge.decide(0.0, auto_off=False)[0] is not Action.GO_ON:
                wrong += 1
                break
    assert wrong <= 10


def test_break_even_is_the_cost_of_updates_in_rounds() -> None:
    assert overhead(8.0, 5, 16.0) == pytest.approx(0.1)
    assert overhead(8.0, 5, 0.0) == 0
    judge = judged(0.5, 0.5, MEMORY)
    assert judge.standing(0.1).break_even == pytest.approx(1.1)
    assert len(judge.pairs) == MEMORY
