"""TTS in the worker without an engine: who is learned from, which weights are in use, and failures that must stay TTS's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from agentguard.errors import ConfigError, PluginError
from agentguard.events import DraftUpdated, TtsChanged
from agentguard.tts_settings import TtsSettings
from engine_plugins.tts import capture as capture_module
from engine_plugins.tts import states as hidden_states
from engine_plugins.tts import wire
from engine_plugins.tts.capture import REQUESTS, Capture, Committed, Seen
from engine_plugins.tts.serving import START, Serving
from engine_plugins.tts.slots import Slots
from engine_plugins.vllm import worker as worker_module
from engine_plugins.vllm.seam_v1 import _without_broken_rows
from tests.chi_square import p_value
from tests.test_rules import distributions
from tests.test_seam_v1 import DRAWS, draws_of

V, K = 20, 3
GOOD = {"tts": {}, "frames": "ipc:///x"}
FACTS = dict.fromkeys(("loss", "train_ms", "rows", "rounds", "live", "frozen", "gain", "break_even"), 1)


class Weights:
    """The worker's side of vLLM's session: which slot is loaded."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.weight_transfer_engine = SimpleNamespace(reset_weight_update_target=lambda: None)
        self._weight_update_active = False
        self.slot = START
        self.broken: set[int] = set()
        self.inits: list[str] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.inits.append(info["path"])

    def start_draft_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("already active")
        self._weight_update_active = True

    def update_weights(self, info: dict[str, Any]) -> None:
        self.slot = info["slot"]
        if info["slot"] in self.broken:
            raise KeyError("no such layer")

    def finish_weight_update(self) -> None:
        self._weight_update_active = False


class Rig:
    def __init__(self, tmp_path: Path, *, connect: bool = True, **settings: Any) -> None:
        self.endpoint = f"ipc://{tmp_path}/frames"
        self.weights = Weights()
        self.events: list[Any] = []
        self.runner = "V1"
        self.settings = {"window": 32, "top_k": 0, **settings}
        parsed = TtsSettings.parse(self.settings)
        self.capture = Capture(self.endpoint, window=parsed.window, width=parsed.top_k)
        self.serving = Serving(self.weights, parsed, self.capture, self.events.append, "engine-0")
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        if connect:
            self.socket.connect(self.endpoint)
            assert self.capture._socket.poll(5000, zmq.POLLOUT), "a frame before the connection is there would be dropped"

    def step(self, begun: list[str], running: set[str], finished: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        scheduled = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=r) for r in begun], finished_req_ids=finished)
        self.serving.before_step(scheduled, running)

    def publish(self, slot: int, epoch: int, action: str = "go_on") -> dict[str, Any]:
        return self.serving.publish({"version": 7, "epoch": epoch, "slot": slot, "action": action, "reason": "r", **FACTS})

    def verify(self, states: dict[str, Any], accepted: int = 1, *, prompts: dict[str, Any] | None = None) -> None:
        """A verification of K drafts of each request, as the seam reports it, beside requests in the middle of their prompts."""
        n = len(states)
        seen = [Seen(i, name, state, i * K, (i + 1) * K) for i, (name, state) in enumerate(states.items())]
        seen += [Seen(n + i, name, state, n * K, n * K) for i, (name, state) in enumerate((prompts or {}).items())]
        logits, drafts = torch.randn(n * K, V), torch.randint(0, V, (n * K,))
        q = torch.randn(n * K, V).softmax(-1)
        held = self.serving.before(seen, logits, q, drafts, torch.zeros(n * K, dtype=torch.bool))
        out = torch.full((n, K + 1), -1)
        out[:, : accepted + 1] = torch.tensor([[*range(accepted), 9]])
        if held is not None:
            self.serving.after(held, out)
        for state in states.values():
            state.output_token_ids += [*range(accepted), 9]

    def frames(self, wait_ms: int = 300) -> list[wire.Frame]:
        found = []
        while self.socket.poll(wait_ms):
            found.append(wire.decode(self.socket.recv()))
        return found

    def close(self) -> None:
        self.capture.close()
        self.socket.close()


@pytest.fixture
def rig(tmp_path: Path) -> Any:
    made = Rig(tmp_path)
    yield made
    made.close()


def state(prompt: int = 10) -> Any:
    return SimpleNamespace(
        prompt_token_ids=list(range(prompt)), output_token_ids=[5], sampling_params=SimpleNamespace(temperature=1.0)
    )


def test_a_preempted_request_that_comes_back_is_no_new_one(rig: Rig) -> None:
    """Runner V2 admits it anew, as the only one, and what was learned from it stays."""
    rig.serving.attach("p", rig.settings)
    rig.step(["a"], set())
    epoch = rig.serving.epoch
    rig.publish(1, epoch)
    rig.step(["a"], {"a"})
    assert (rig.weights.slot, rig.serving.epoch) == (1, epoch)
    rig.step(["a"], {"a"}, {"a"})
    assert (rig.weights.slot, rig.serving.epoch) == (START, epoch + 1), "an id that has ended and is used again is"


def test_tokens_on_the_device_are_sent_from_where_the_trainer_stands() -> None:
    """`Committed`: a window's tokens come along with each step, and those that were sent are left out."""
    committed = Committed(torch.tensor([5, 40]), [3, 30], torch.tensor([[0, 0, 0, *range(5)], list(range(32, 40))]))
    assert committed.facts(0, 0) == (5, 0, [0, 1, 2, 3, 4], 2)
    assert committed.facts(0, 3) == (5, 3, [3, 4], 2)
    assert committed.facts(0, 5) == (5, 5, [], 2)
    assert committed.facts(1, 0) == (40, 32, list(range(32, 40)), 10), "of a long request the window"
    assert committed.facts(1, 38) == (40, 38, [38, 39], 10)


def test_nothing_is_captured_before_a_trainer_is_there(rig: Rig) -> None:
    assert not rig.serving.capturing
    rig.serving.attach("p", rig.settings)
    assert rig.serving.capturing
    rig.serving.detach("paused", "")
    assert not rig.serving.capturing
    assert [e.state for e in rig.events] == ["paused"]


def test_frames_carry_each_token_once_and_a_window_of_a_long_prompt(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    one = state(prompt=100)
    for _ in range(3):
        rig.verify({"r": one})
    rows = [frame.rounds[0] for frame in rig.frames()]
    assert [(r.start, r.since) for r in rows] == [(101, 69), (103, 101), (105, 103)]
    assert rows[0].tokens == [*range(69, 100), 5]
    assert rows[1].tokens == [0, 9]
    assert [r.out for r in rows] == [[0, 9]] * 3


def step_of_a_head(rig: Rig, states: dict[str, Any], *, width: int = 3) -> None:
    """The drafter gets the hidden states of what the step computed: of a prompt all positions, later K + 1, of which one draft was
    accepted."""
    starts, positions = [0], []
    for one in states.values():
        end = len(one.prompt_token_ids) + len(one.output_token_ids)
        positions += range(end - 1) if len(one.output_token_ids) == 1 else range(end - 3, end - 2 + K)
        starts.append(len(positions))
    rows = torch.tensor(positions, dtype=torch.bfloat16)[:, None].expand(-1, width)
    drafted(rig, states, torch.tensor(positions), rows, starts)


def drafted(rig: Rig, states: dict[str, Any], positions: torch.Tensor, rows: torch.Tensor, starts: list[int]) -> None:
    """The drafter is called, on the runner of this rig, whose layers' hidden states come in two pieces on V2."""
    if rig.runner == "V1":
        runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=list(states)), requests=states)
        runner.drafter = SimpleNamespace(propose=lambda target_positions, target_hidden_states, common_attn_metadata: None)
        hidden_states.install_v1(runner, rig.serving)
        runner.drafter.propose(positions, rows, common_attn_metadata=SimpleNamespace(query_start_loc_cpu=torch.tensor(starts)))
        return
    slots = [7 - n for n in range(len(states))] if len(states) < 8 else list(range(len(states)))
    runner = SimpleNamespace(speculator=SimpleNamespace(propose=lambda input_batch, aux_hidden_states, dummy_run=False: None))
    hidden_states.install_v2(runner, rig.serving, dict(zip(slots, states.values(), strict=True)).__getitem__)
    batch = SimpleNamespace(
        req_ids=list(states), idx_mapping_np=np.array(slots), query_start_loc_np=np.array(starts), positions=positions
    )
    runner.speculator.propose(batch, [rows[:, :1], rows[:, 1:]])
    runner.speculator.propose(batch, [rows[:, :1], rows[:, 1:]], dummy_run=True)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_hidden_states_leave_with_the_next_frame_once(runner: str, rig: Rig) -> None:
    rig.runner = runner
    rig.serving.attach("p", rig.settings)
    states = {"r": state(prompt=40), "s": state(prompt=3)}
    for _ in range(3):
        step_of_a_head(rig, states)
        rig.verify(states)
    frames = rig.frames()
    found = {name: [[(h.start, len(h.rows())) for h in row.hidden] for f in frames for row in f.rounds if row.request == name]
             for name in states}  # fmt: skip
    assert found["r"] == [[(8, 32)], [(40, K + 1)], [(42, K + 1)]], "of a long prompt a window"
    assert found["s"] == [[(0, 3)], [(3, K + 1)], [(5, K + 1)]]
    for piece in (h for f in frames for row in f.rounds for h in row.hidden):
        assert piece.rows()[:, 0].tolist() == list(range(piece.start, piece.start + len(piece.rows())))


def test_hidden_states_are_bounded_and_go_with_their_request(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    states = {f"r{i}": state(prompt=40) for i in range(4 * REQUESTS)}
    for _ in range(50):
        step_of_a_head(rig, states)
        rig.verify(states)
        rig.frames(0)
    kept = rig.capture._states
    assert len(kept) <= 2 * REQUESTS
    assert {f"r{i}" for i in range(REQUESTS)} <= set(kept)
    assert all(known.rows <= 32 + K for known in kept.values())
    rig.verify({"r1": states["r1"]})
    assert list(kept) == ["r1"]
    rig.serving.detach("paused", "")
    assert not kept


def test_a_frame_carries_the_newest_hidden_states_that_fit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves behind is not sent later: the trainer begins anew where the rows begin."""
    monkeypatch.setattr(capture_module, "HIDDEN_BYTES", 20 * 3 * 2)
    rig.serving.attach("p", rig.settings)
    one = {"r": state(prompt=40)}
    for _ in range(2):
        step_of_a_head(rig, one)
        rig.verify(one)
    pieces = [[(h.start, len(h.rows())) for h in f.rounds[0].hidden] for f in rig.frames()]
    assert pieces == [[(20, 20)], [(40, K + 1)]]


def test_what_belongs_to_the_target_is_never_loaded(tmp_path: Path) -> None:
    """Whatever a trainer says it has: the slots' names are read before anything is."""
    rig = Rig(tmp_path)
    rig.serving._fixed = ("lm_head.weight",)
    slots = Slots.create(tmp_path / "slots", {"lm_head.weight": torch.ones(2, 2)}, torch.float32)
    with pytest.raises(PluginError, match=r"lm_head\.weight, which belong to the target"):
        rig.serving.attach(str(slots.path), rig.settings)
    assert rig.weights.inits == []
    slots.close()
    rig.close()


def test_a_dropped_frame_loses_no_hidden_states(tmp_path: Path) -> None:
    rig = Rig(tmp_path, connect=False)
    rig.serving.attach("p", rig.settings)
    one = {"r": state()}
    step_of_a_head(rig, one)
    rig.verify(one)
    assert rig.capture.dropped == 1
    rig.socket.connect(rig.endpoint)
    found: list[wire.Frame] = []
    while not found:  # until the connection is there
        step_of_a_head(rig, one)
        rig.verify(one)
        found = rig.frames(50)
    starts = [h.start for h in found[0].rounds[0].hidden]
    assert starts[:2] == [0, 10]
    assert len(starts) == 1 + rig.capture.dropped
    rig.close()


def test_a_request_that_was_beside_others_in_its_prompt_brings_all_of_it(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    one, late = state(), state(prompt=20)
    late.output_token_ids.clear()
    step_of_a_head(rig, {"r": one})
    for _ in range(2):
        drafted(rig, {"late": late}, torch.arange(20), torch.zeros(20, 3), [0, 20])
        rig.verify({"r": one}, prompts={"late": late})
    late.output_token_ids.append(7)
    rig.verify({"r": one, "late": late})
    *before, last = rig.frames()
    assert [[row.request for row in f.rounds] for f in before] == [["r"], ["r"]]
    row = last.rounds[1]
    assert (row.request, row.since, row.tokens) == ("late", 0, [*range(20), 7])
    assert row.hidden[0].start == 0


def test_a_request_with_a_known_id_is_another_one(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    rig.verify({"r": state()})
    rig.verify({"r": state()})
    assert [frame.rounds[0].since for frame in rig.frames()] == [0, 0]


def test_the_same_requests_of_a_large_batch_are_learned_from_until_they_end(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    states = {f"r{i}": state() for i in range(3 * REQUESTS)}
    for _ in range(3):
        rig.verify(states)
    chosen = [[row.request for row in frame.rounds] for frame in rig.frames()]
    assert chosen == [[f"r{i}" for i in range(REQUESTS)]] * 3
    del states["r2"]
    rig.verify(states)
    (frame,) = rig.frames()
    assert [row.request for row in frame.rounds] == [f"r{i}" for i in range(REQUESTS + 1) if i != 2]
    assert [row.since for row in frame.rounds][-1] == 0, "a request that comes in brings its whole window"


def test_a_full_queue_drops_frames_counts_them_and_heals(tmp_path: Path) -> None:
    """Full from the start, as nobody has connected."""
    rig = Rig(tmp_path, connect=False)
    rig.serving.attach("p", rig.settings)
    one = state()
    for _ in range(5):
        rig.verify({"r": one})
    assert rig.capture.dropped == 5
    rig.socket.connect(rig.endpoint)
    found: list[wire.Frame] = []
    while not found:  # until the connection is there
        rig.verify({"r": one})
        found = rig.frames(50)
    assert found[0].dropped >= 5
    row = found[0].rounds[0]
    everything = one.prompt_token_ids + one.output_token_ids
    assert row.tokens == everything[row.since : row.start]
    assert row.since == max(0, row.start - 32), "nothing of the window is missing"
    rig.close()


def test_a_request_that_begins_alone_gets_the_start_weights(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    rig.step(["a"], set())
    epoch = rig.serving.epoch
    assert rig.publish(1, epoch)["applied"]
    assert (rig.weights.slot, rig.serving.version) == (1, 7)
    rig.step(["b"], {"a"})
    assert rig.serving.epoch == epoch, "b runs beside a and shares what was learned"
    assert rig.weights.slot == 1
    rig.step(["c"], {"a", "b"}, {"a", "b"})
    assert rig.serving.epoch == epoch + 1
    assert (rig.weights.slot, rig.serving.version) == (START, 0)
    assert "a new request began" in rig.publish(2, epoch)["reason"]
    assert rig.weights.slot == START


def test_without_a_reset_what_was_learned_stays(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.serving.attach("p", rig.settings | {"reset": "never"})  # settings come with the trainer, not with the engine
    epoch = rig.serving.epoch
    rig.publish(1, epoch)
    rig.step(["b"], {"a"}, {"a"})
    assert (rig.weights.slot, rig.serving.epoch) == (1, epoch)
    rig.close()


def test_requests_that_are_given_up_are_left_alone_until_they_end(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    rig.step(["a", "b"], set())
    epoch = rig.serving.epoch
    assert rig.publish(START, epoch, "stop")["applied"]
    assert not rig.serving.capturing
    rig.step(["c"], {"a", "b"}, {"a"})
    assert not rig.serving.capturing
    rig.step([], {"b", "c"}, {"b"})
    assert rig.serving.capturing, "c was not given up"
    assert rig.serving.epoch == epoch + 1
    assert [e.state for e in rig.events] == ["stopped"]


def test_a_failed_load_goes_back_to_the_start_weights(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    epoch = rig.serving.epoch
    rig.publish(1, epoch)
    rig.weights.broken = {2}
    with pytest.raises(KeyError):
        rig.publish(2, epoch)
    assert (rig.weights.slot, rig.serving.version) == (START, 0)
    assert not rig.serving.capturing
    rig.serving.attach("other", rig.settings)  # a later trainer can still come
    assert rig.serving.capturing
    assert rig.weights.inits == ["p", "other"]


def test_a_failure_inside_a_step_is_an_event_and_not_an_error(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    rig.publish(1, rig.serving.epoch)
    rig.weights.broken = {START}
    rig.step(["b"], {"a"}, {"a"})
    assert not rig.serving.capturing
    off = [e for e in rig.events if isinstance(e, TtsChanged)][-1]
    assert off.state == "off"
    assert "going back to the start weights failed" in off.reason
    assert off.version == 7, "the event does not claim the start weights"
    assert rig.serving.failed == off.reason, "also for who asks"
    rig.weights.broken = set()
    rig.serving.attach("p", rig.settings)
    assert rig.serving.failed == ""
    rig.capture._socket.close()
    rig.verify({"r": state()})
    assert "sending a verification failed" in rig.events[-1].reason


def test_updates_are_events(rig: Rig) -> None:
    rig.serving.attach("p", rig.settings)
    rig.publish(1, rig.serving.epoch)
    (event,) = rig.events
    assert isinstance(event, DraftUpdated)
    assert (event.version, event.epoch, event.engine) == (7, rig.serving.epoch, "engine-0")
    assert event.publish_ms > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_of_q_that_are_no_law_are_rejected_and_the_targets_law_is_drawn(bad: float) -> None:
    """Chi-square with the stock kernels; without the correction a NaN or infinite q draws from another law."""
    p, q = distributions(11)
    drawn: list[tuple[torch.Tensor, float]] = []
    for correct in (True, False):

        def spoil(logits: torch.Tensor, draft: torch.Tensor, x: torch.Tensor, correct: bool = correct) -> None:
            draft.fill_(bad)
            if correct:
                _without_broken_rows(draft)

        drawn.append(draws_of(p, q, DRAWS, 5, spoil))
    (counts, accepted), (spoiled, _) = drawn
    assert accepted == 0
    assert p_value(counts, p * DRAWS) > 1e-3
    assert p_value(spoiled, p * DRAWS) < 1e-9


def test_rows_that_are_laws_are_left_alone() -> None:
    good = torch.rand(4, V).softmax(-1)
    before = good.clone()
    _without_broken_rows(good)
    assert torch.equal(good, before)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"settings": {"tts": {}}}, "additional_config.agentguard.frames"),
        ({"settings": {"tts": {"strid": 1}, "frames": "ipc:///x"}}, "did you mean 'stride'"),
        ({"settings": GOOD, "backend": "nccl"}, "agentguard_shm"),
        ({"settings": GOOD, "method": "medusa"}, "speculative_config.method='medusa'"),
        ({"settings": GOOD, "method": "eagle3", "parallel": True}, "parallel_drafting"),
        ({"settings": GOOD, "method": "eagle3", "mrope": True}, "M-RoPE"),
        ({"settings": GOOD, "method": "eagle3", "stages": 2}, "pipeline_parallel_size"),
    ],
)
def test_a_set_up_without_effect_is_refused(config: dict[str, Any], named: str) -> None:
    vllm_config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend=config.get("backend", "agentguard_shm")),
        speculative_config=SimpleNamespace(
            method=config.get("method", "draft_model"), parallel_drafting=config.get("parallel", False)
        ),
        model_config=SimpleNamespace(uses_mrope=config.get("mrope", False)),
        parallel_config=SimpleNamespace(pipeline_parallel_size=config.get("stages", 1)),
    )
    worker = SimpleNamespace(vllm_config=vllm_config, is_driver_worker=False)
    with pytest.raises(ConfigError, match=named):
        worker_module._serving(worker, config["settings"], "engine-0", None)
