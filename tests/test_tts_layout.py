"""Row alignment: what one packed forward pass says of a row is what the draft says of that token alone."""

from __future__ import annotations

import torch

from agentguard.tts_settings import TtsSettings
from engine_plugins.tts.layout import chosen, pack
from engine_plugins.tts.rounds import Sequence
from engine_plugins.tts.twin import Twin
from engine_plugins.tts.wire import Laws
from tests.tts_rows import K, V, laws, round_frame, small_draft


def history(*rounds: tuple[int, list[int]], start: int = 40, keep: int = 256) -> tuple[Sequence, list[int]]:
    """A request of rounds (accepted, drafted); returns its sequence and all its committed tokens."""
    sequence, tokens, since = Sequence(keep), [i % V for i in range(start)], 0
    for number, (accepted, drafted) in enumerate(rounds):
        sequence.add(round_frame(len(tokens), accepted, since=since, tokens=tokens[since:], drafted=drafted, seed=number), number)
        since = len(tokens)
        tokens += [*drafted[:accepted], (len(tokens) + accepted) % V]
    return sequence, tokens


def alone(twin: Twin, context: list[int]) -> torch.Tensor:
    """The draft's logits after a context, in a pass of its own."""
    return twin.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]


def test_rows_of_an_autoregressive_draft() -> None:
    twin = Twin(small_draft(), TtsSettings())
    rounds = [(2, [1, 2, 3, 4]), (0, [5, 6, 7, 8]), (4, [9, 10, 11, 12]), (1, [20, 21, 22, 23])]
    sequence, _ = history(*rounds)
    packed = pack(sequence, list(sequence.rounds), 256)
    assert packed is not None
    assert packed.attend is None
    expected = [(r.start, k) for r in sequence.rounds for k in range(min(r.accepted, K - 1) + 1)]
    assert packed.k.tolist() == [k for _, k in expected]
    logits = twin.logits(packed)
    for row, (start, k) in enumerate(expected):
        context = sequence.tokens[: start + k]
        torch.testing.assert_close(logits[row], alone(twin, context), atol=1e-4, rtol=1e-4)


def test_rows_behind_the_first_rejected_token_hang_on_a_branch() -> None:
    twin = Twin(small_draft(1), TtsSettings())
    rounds = [(2, [1, 2, 3, 4]), (0, [5, 6, 7, 8]), (4, [9, 10, 11, 12]), (1, [20, 21, 22, 23])]
    sequence, _ = history(*rounds)
    packed = pack(sequence, list(sequence.rounds), 256, rejected=True)
    assert packed is not None
    assert packed.k.tolist() == [0, 1, 2, 3] * 4
    logits = twin.logits(packed)
    for row, (r, k) in enumerate((r, k) for r in sequence.rounds for k in range(K)):
        context = sequence.tokens[: r.start] + r.drafted[:k]
        torch.testing.assert_close(logits[row], alone(twin, context), atol=1e-4, rtol=1e-4)


def test_rows_of_a_parallel_draft_come_from_its_masks() -> None:
    mask = V - 1
    twin = Twin(small_draft(2), TtsSettings(), mask_token=mask)
    sequence, _ = history((2, [1, 2, 3, 4]), (0, [5, 6, 7, 8]), (4, [9, 10, 11, 12]))
    for rejected in (False, True):
        packed = pack(sequence, list(sequence.rounds), 256, rejected=rejected, mask_token=mask)
        assert packed is not None
        rows = [(r, k) for r in sequence.rounds for k in range(K) if rejected or k <= min(r.accepted, K - 1)]
        assert packed.k.tolist() == [k for _, k in rows]
        logits = twin.logits(packed)
        for row, (r, k) in enumerate(rows):
            context = sequence.tokens[: r.start] + [mask] * k
            torch.testing.assert_close(logits[row], alone(twin, context), atol=1e-4, rtol=1e-4)


def test_targets_and_sources_stay_beside_their_rows() -> None:
    sequence, _ = history((1, [1, 2, 3, 4]), (3, [5, 6, 7, 8]))
    packed = pack(sequence, list(sequence.rounds), 256)
    assert packed is not None
    assert packed.source is not None
    p0, q0 = laws(K, seed=0)
    p1, q1 = laws(K, seed=1)
    torch.testing.assert_close(packed.target.logp, torch.cat([p0.logp[:2], p1.logp[:4]]))
    torch.testing.assert_close(packed.source.logp, torch.cat([q0[:2], q1[:4]]))
    assert packed.number.tolist() == [0, 0, 1, 1, 1, 1]


def test_positions_are_those_of_the_request_in_a_cut_window() -> None:
    twin = Twin(small_draft(3), TtsSettings())
    sequence, _ = history(*[(2, [(7 * i + j) % V for j in range(K)]) for i in range(20)])
    rounds = chosen(sequence, 32, 0)
    packed = pack(sequence, rounds, 32)
    assert packed is not None
    end = sequence.base + len(sequence.tokens)
    assert packed.positions.tolist() == list(range(end - 32, end))
    assert all(r.start >= end - 16 for r in rounds)
    # rotary positions are relative, so the same window from 0 on gives the same laws
    moved = pack(sequence, rounds, 32)
    assert moved is not None
    torch.testing.assert_close(
        twin.logits(packed)[-1], alone(twin, packed.ids.tolist()[: int(packed.at[-1]) + 1]), atol=1e-4, rtol=1e-4
    )


def test_forced_undrafted_and_broken_rows_are_not_learned_from() -> None:
    p, q = laws(K)
    p.logp[2] = torch.nan
    sequence = Sequence(64)
    frame = round_frame(30, 3, forced=[True, False, False, False], pack=Laws.pack(p, q))
    sequence.add(frame, 1)
    packed = pack(sequence, list(sequence.rounds), 64)
    assert packed is not None
    assert packed.k.tolist() == [1, 3]
    assert sequence.unusable == 1
    nothing = Sequence(64)
    nothing.add(round_frame(30, 0, drafted=[-1, -1, -1, -1]), 1)
    assert pack(nothing, list(nothing.rounds), 64) is None
    assert pack(nothing, [], 64) is None


def test_a_lost_frame_leaves_no_hole() -> None:
    sequence = Sequence(64)
    sequence.add(round_frame(30, 1), 1)
    # the frame at 32 was dropped; the next one carries the tokens since
    sequence.add(round_frame(36, 2, since=30), 3)
    assert sequence.tokens == [i % V for i in range(39)]
    assert [r.start for r in sequence.rounds] == [30, 36]
    # more than a window was lost: what lies before the gap is forgotten
    sequence.add(round_frame(300, 0, since=236), 9)
    assert sequence.base == 236
    assert sequence.tokens == [i % V for i in range(236, 301)]
    assert [r.start for r in sequence.rounds] == [300]


def test_memory_of_a_request_is_bounded() -> None:
    sequence = Sequence(64)
    at = 30
    for number in range(500):
        sequence.add(round_frame(at, 3, since=at - 4 if number else 0), number)
        at += 4
        assert len(sequence.tokens) <= 2 * 64 + 40
    assert len(sequence.rounds) <= 48
    assert sequence.tokens == [i % V for i in range(sequence.base, at)]


def test_chosen_takes_the_newest_rounds() -> None:
    sequence, _ = history(*[(1, [1, 2, 3, 4])] * 30)
    assert [r.start for r in chosen(sequence, 256, 3)] == [r.start for r in list(sequence.rounds)[-3:]]
    assert len(chosen(sequence, 40, 0)) == 10


def test_a_window_that_is_sent_again_takes_the_place_of_what_was_known() -> None:
    """An id that is used again, or a worker that forgot what it sent."""
    sequence = Sequence(64)
    for number in range(60):
        sequence.add(round_frame(200 + 3 * number, 2, since=197 + 3 * number if number else 136), number)
    assert sequence.base > 136
    sequence.add(round_frame(40, 1), 70)
    assert (sequence.base, sequence.tokens) == (0, [i % V for i in range(42)])
    assert [r.start for r in sequence.rounds] == [40]
