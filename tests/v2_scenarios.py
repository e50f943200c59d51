"""What Model Runner V2's own functions do with our rows and our budgets, on a CPU: `python -m tests.v2_scenarios DRAWS [laws]`
prints JSON.

Run by tests/test_seam_v2.py in a process of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
import warnings
from types import SimpleNamespace
from typing import Any

from tests import v2_on_cpu as v2  # before vLLM

import torch  # isort: skip
import zmq  # isort: skip
from triton._C.libtriton import native_specialize_impl  # isort: skip
from triton.backends.nvidia.compiler import CUDABackend  # isort: skip
from vllm.sampling_params import SamplingParams  # isort: skip
from vllm.v1.worker.gpu.input_batch import post_update  # isort: skip
from vllm.v1.worker.gpu.sample.sampler import Sampler  # isort: skip
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator  # isort: skip
from vllm.v1.worker.gpu.states import RequestState  # isort: skip

from agentguard.tts_settings import TtsSettings
from engine_plugins.tts import wire
from engine_plugins.tts.capture import Capture
from engine_plugins.tts.serving import Serving
from engine_plugins.vllm.observe import Rounds
from engine_plugins.vllm.phase import PhaseTracker, ThinkMarkers
from tests import fake_device
from tests.test_rules import distributions
from tests.v2_laws import FILTERED, RULES

K = 2
MARKERS = ThinkMarkers((4,), (5,))


def text_of(rule: str) -> str:
    return rule if "p_min" in rule or rule == "strict" else rule + ",p_min=0,top_k=0"


def pairs(rules: tuple[str, ...], p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the seam makes of a row for each rule and drafted token: target and draft logits, [rules, V, V]."""
    v, n = len(p), len(rules) * len(p)
    engine = v2.Engine(n, v, 1)
    engine.draft[:] = q.log()
    for slot in range(n):
        engine.admit(slot, f"r{slot}", [1, 2], ag_rule=text_of(rules[slot // v]), ag_phase="both")
    seen: list[torch.Tensor] = []

    def stock(target_logits: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(target_logits)
        return torch.empty(0), torch.empty(0)

    engine.seam._stock = stock
    engine.verify(p.log().repeat(2 * n, 1), [[slot % v] for slot in range(n)], list(range(n)))
    return seen[0][::2].view(len(rules), v, v), engine.draft.view(len(rules), v, v)


def exact(rules: tuple[str, ...]) -> list[list[float]]:
    """The law of the emitted token that V2's verification gives on our rows, by its own definition and without a draw: p' and q'
    are the normalised rows, x is accepted with min(1, p'(x) / q'(x)), else drawn from the rest of p' above q'."""
    p, q = (t.double() for t in distributions(11))
    target, draft = (rows.double().softmax(-1) for rows in pairs(rules, p.float(), q.float()))
    at = torch.arange(len(p))
    accept = (target[:, at, at] / draft[:, at, at]).clamp_max(1)
    rest = (target - draft).clamp_min(0)
    rest = rest / rest.sum(-1, keepdim=True).clamp_min(1e-300)
    law = torch.diag_embed(accept) + (1 - accept).unsqueeze(-1) * rest
    return [[float(v) for v in row] for row in (q[:, None] * law).sum(1)]


def laws(draws: int, rules: tuple[str, ...]) -> dict[str, Any]:
    """Tokens V2's `rejection_sample` emits on our rows, until each rule has so many decided draft rows: counts by token, and how
    many of the drafts were accepted. The rules are in one batch."""
    p, q = (t.float() for t in distributions(11))
    target, draft = pairs(rules, p, q)
    v, steps, each = len(p), 4, 12
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(len(rules), v, dtype=torch.int64)
    accepted = torch.zeros(len(rules))
    seed = 0
    while int(counts.sum(-1).min()) < draws:
        short = (counts.sum(-1) < draws).nonzero().squeeze(-1)
        rule = short.repeat_interleave(each)
        n = len(rule)
        x = torch.multinomial(q, n * steps, replacement=True, generator=generator).view(n, steps)
        rows = torch.cat([target[rule.unsqueeze(-1), x], p.log().expand(n, 1, v)], 1).reshape(-1, v)
        slot = torch.arange(n)
        sampled, number = v2.stock(
            rows.contiguous(), draft[rule.unsqueeze(-1), x].contiguous(), torch.cat([x.new_zeros(n, 1), x], 1).flatten(),
            torch.arange(0, n * (steps + 1) + 1, steps + 1, dtype=torch.int32), torch.arange(steps + 1).repeat(n) + 7, slot,
            slot.repeat_interleave(steps + 1), torch.arange(steps + 1).repeat(n), torch.ones(n),
            torch.randint(1 << 40, (n,), generator=generator), steps,
        )  # fmt: skip
        for i in range(n):
            known = min(int(number[i]), steps)
            counts[rule[i]] += torch.bincount(sampled[i, :known], minlength=v)
            accepted[rule[i]] += int(number[i]) - 1
        seed += 1
        if seed % 50 == 0:
            print(f"{int(counts.sum(-1).min())} of {draws}", file=sys.stderr, flush=True)
    return {
        "counts": dict(zip(rules, counts.tolist(), strict=True)),
        "accepted": dict(zip(rules, (accepted / counts.sum(-1)).tolist(), strict=True)),
    }


def strict_beside_relaxed() -> dict[str, Any]:
    """Strict requests draw the same tokens alone, beside relaxed ones, and from stock."""
    p, q = (t.float() for t in distributions(3))
    n = 24
    drafts = torch.multinomial(q, n * K, replacement=True, generator=torch.Generator().manual_seed(1)).view(n, K).tolist()
    out = []
    for relaxed in ("interp:w=1,p_min=0,top_k=0", "strict"):
        engine = v2.Engine(n, len(p), K)
        engine.draft[:] = q.log()
        for slot in range(n):
            engine.admit(slot, f"r{slot}", [1], ag_rule=relaxed if slot % 2 else "strict", ag_phase="both")
        sampled, number = engine.verify(p.log().repeat(n * (K + 1), 1), drafts, list(range(n)), seed=5)
        out.append([row[:k] for row, k in zip(sampled.tolist(), number.tolist(), strict=True)])
    return {"mixed": out[0][::2], "alone": out[1][::2], "relaxed": [len(row) for row in out[0][1::2]]}


class Tap:
    wanted = True

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def publish(self, t: float, step: int, rounds: Rounds) -> None:
        self.frames.append(rounds.packed(t, "e", step).unpacked().requests)


def telemetry() -> dict[str, Any]:
    """Forced, forbidden, filtered and greedy rows under one rule, two chunks' worth of requests, and what the tap says of them."""
    p, q = (t.float() for t in distributions(11))
    tap = Tap()
    engine = v2.Engine(6, len(p), K, markers=MARKERS, tap=tap)
    engine.draft[:] = q.log()
    low = int(p.argmin())
    for slot in range(6):
        engine.admit(slot, f"r{slot}", [4, 1], ag_rule="interp:w=1,p_min=0.05,top_k=0", ag_phase="think")
    logits = p.log().repeat(18, 1)
    logits[3, 2] = 1e9  # the first row of the second request
    logits[6, 1] = -torch.inf
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    drafts = [[1, 2], [0, 0], [1, 0], [low, 0], [0, 0], [5, 2]]  # the last one drafts the end marker, then a token of the answer
    sampled, number = engine.verify(logits, drafts, list(range(6)), temperature=temperature)
    (frame,) = tap.frames
    rows = [
        {"request": r.request, "accepted": r.accepted, "effective": r.rule_effective, "flags": r.rows.flags, "p": r.rows.p,
         "q": r.rows.q, "rank": r.rows.rank, "would": r.rows.would, "fate": [str(f) for f in r.rows.fate], "tokens": r.rows.token}
        for r in frame
    ]  # fmt: skip
    return {
        "rows": rows,
        "sampled": sampled[:, 0].tolist(),
        "number": number.tolist(),
        "p": p.tolist(),
        "q": q.tolist(),
        "low": low,
    }


def own_sampler() -> dict[str, Any]:
    """vLLM's own `RejectionSampler` behind the proxy, with the batch cut into chunks of one request, as it does with large ones."""
    p, q = (t.float() for t in distributions(11))
    n, tap, device = 4, Tap(), torch.device("cpu")
    engine = v2.Engine(n, len(p), K, tap=tap)
    engine.draft[:] = q.log()
    engine.seam.warm_up(len(p), engine.draft, K, ())
    assert torch.equal(engine.draft, q.log().expand(n, K, len(p))), "warming up writes to nothing"
    for slot in range(n):
        engine.admit(slot, f"r{slot}", [1, 2, 3], ag_rule="strict" if slot % 2 else "interp:w=1,p_min=0,top_k=0", ag_phase="both")
    engine.slots.flush()
    engine.states.prefill_len = v2.Held(torch.full((n,), 3, dtype=torch.int32))
    states = SimpleNamespace(
        temperature=v2.Held(torch.ones(n)), seeds=v2.Held(torch.arange(n) + 5), max_num_logprobs=lambda slots: -1
    )
    sampler = SimpleNamespace(
        compute_nans=False, req_states=engine.states, sampling_states=states, logprobs_mode="raw_logprobs",
        return_sampling_mask=False, use_fp64_gumbel=False, apply_sampling_params=lambda logits, *_: logits.float().clone(),
    )  # fmt: skip
    config = SimpleNamespace(
        num_speculative_tokens=K, enable_adaptive_verification=True, rejection_sample_method="standard", fly_entropy_threshold=0.3,
        fly_entropy_top_k=3,
    )  # fmt: skip
    real = v2.rejection_sampler.RejectionSampler(sampler, config, device)
    order = [2, 1, 0, 3]
    rows, slots = n * (K + 1), torch.tensor(order, dtype=torch.int32)
    drafts = torch.multinomial(q, n * K, replacement=True, generator=torch.Generator().manual_seed(1)).view(n, K)
    ends = torch.arange(0, rows + 1, K + 1, dtype=torch.int32)
    batch = SimpleNamespace(
        req_ids=[f"r{slot}" for slot in order], num_reqs=n, idx_mapping=slots, idx_mapping_np=slots.numpy(),
        expanded_idx_mapping=slots.repeat_interleave(K + 1), expanded_local_pos=torch.arange(K + 1, dtype=torch.int32).repeat(n),
        input_ids=torch.cat([torch.full((n, 1), 3), drafts], 1).flatten().int(), positions=torch.arange(K + 1).repeat(n) + 3,
        logits_indices=torch.arange(rows), cu_num_logits=ends, cu_num_logits_np=ends.numpy(), seq_lens=torch.full((n,), 9).int(),
        seq_lens_cpu_upper_bound=torch.full((n,), 9).int(),
    )  # fmt: skip
    out = {}
    for name, limit in (("whole", 2**30), ("chunks", (K + 1) * len(p) * 4)):
        v2.rejection_sampler.MAX_CHUNK_BYTES = limit
        logits = p.log().repeat(rows, 1)
        engine.draft[:] = q.log()
        proxy = v2.seam_v2.SamplerProxy(real, engine.seam)
        proxy.enable_adaptive_verification = False  # vLLM's warm-up, without which chunks end in an assertion
        found = proxy(logits, batch, engine.draft, None)
        out[name] = [row[:k] for row, k in zip(found.sampled_token_ids.tolist(), found.num_sampled.tolist(), strict=True)]
        out[f"{name} kept"] = bool(torch.equal(logits, p.log().repeat(rows, 1)))
    out["steps"] = proxy.num_speculative_steps
    out["switched"] = real.enable_adaptive_verification is False
    del proxy.enable_adaptive_verification
    out["deleted"] = not hasattr(real, "enable_adaptive_verification")
    out["drafts"] = drafts.tolist()
    out["frames"] = [[request.request for request in frame] for frame in tap.frames]
    return out


def installed(rank: int = 0, ranks: int = 1, endpoint: str = "") -> dict[str, Any]:
    """The worker's own installation over vLLM's own request states, sampler, rejection sampler and update kernels; two requests
    that think, one under a rule and a limit, one strict and free. rank, ranks: of a tensor-parallel engine, whose gloo group is the
    default one; endpoint: of telemetry."""
    import engine_plugins.vllm as plugin
    from engine_plugins.vllm import worker
    from engine_plugins.vllm.processor import AgentGuardParams

    plugin.register()
    v2.rejection_sampler.rejection_sample = v2.stock
    n, v, device = 4, 12, torch.device("cpu")
    states = RequestState(n, 64, 64, K, v, device)
    reasoning = SimpleNamespace(reasoning_start_token_ids=[4], reasoning_end_token_ids=[5], natural_reasoning_end_token_ids=[5])
    speculative = SimpleNamespace(
        num_speculative_tokens=K, enable_adaptive_verification=False, rejection_sample_method="standard",
        draft_sample_method="probabilistic", fly_entropy_threshold=0.3, fly_entropy_top_k=3,
    )  # fmt: skip
    config = SimpleNamespace(
        reasoning_config=reasoning, speculative_config=speculative,
        additional_config={"agentguard": {"rule": "strict", "telemetry": endpoint}},
        parallel_config=SimpleNamespace(world_size=ranks, tensor_parallel_size=ranks, data_parallel_rank=0), watermark_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        model_config=SimpleNamespace(dtype=torch.bfloat16, head_dtype=torch.bfloat16),
    )  # fmt: skip
    sampler = Sampler(config, n, v, device, states, num_speculative_tokens=K + 1, custom_logits_processors=[AgentGuardParams()])
    draft = torch.full((n, K, v), -2.0).bfloat16()
    runner = SimpleNamespace(
        req_states=states, sampler=sampler, rejection_sampler=v2.rejection_sampler.RejectionSampler(sampler, speculative, device),
        speculator=SimpleNamespace(draft_logits=draft), batch_sharder=None, is_last_pp_rank=True, vocab_size=v,
        num_speculative_steps=K,
    )  # fmt: skip
    this = SimpleNamespace(vllm_config=config, model_runner=runner, device=device, is_driver_worker=rank == 0, ag_tts=None)
    if ranks > 1:
        worker._group = lambda _: torch.distributed.group.WORLD
    budgets = worker.install(this)
    off = {f.name: f.reason for f in worker.features(this, {}, "V2") if not f.on}
    tap, digest = this.ag_seam._tap, hashlib.sha256()
    if tap is not None and endpoint:
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(endpoint)
        while not tap.wanted:
            pass

    def admit(request: str, **extra: Any) -> int:
        params = SamplingParams(temperature=0.7, seed=1, extra_args=extra)
        AgentGuardParams.validate_params(params)
        states.add_request(request, 2, [1, 4], 0, 40)
        slot = states.req_id_to_index[request]
        sampler.add_request(slot, params)
        states.apply_staged_writes()
        sampler.apply_staged_writes()
        return slot

    slots = [admit("bound", ag_rule="interp:w=1,p_min=0,top_k=0", ag_think_tokens=5), admit("free")]
    copied = [bool(sampler.needs_logits_processing[slot]) for slot in slots]
    for step in range(5):
        if step == 3:  # as a collective RPC has it: on all ranks between the same two steps
            budgets.set_total("bound", 5)
        sampler.apply_staged_writes()
        rows, order = 2 * (K + 1), torch.tensor(slots)
        # the model wants token 8 and hardly 7; the drafter proposes 7 and is sure of it
        logits = torch.zeros(rows, v).bfloat16()
        logits[:, 8], logits[:, 7] = 9.0, 3.0
        draft.fill_(-2.0)
        draft[:, :, 7] = 9.0
        total = states.total_len.gpu[order]
        last = states.all_token_ids.gpu[order, total.long() - 1]
        drafted = torch.full((2, K), 7, dtype=torch.int32)
        ends = torch.arange(0, rows + 1, K + 1, dtype=torch.int32)
        batch = SimpleNamespace(
            req_ids=["bound", "free"], num_reqs=2, idx_mapping=order, idx_mapping_np=order.numpy(),
            expanded_idx_mapping=order.repeat_interleave(K + 1), expanded_local_pos=torch.arange(K + 1,
            dtype=torch.int32).repeat(2), input_ids=torch.cat([last.unsqueeze(-1), drafted], 1).flatten().int(),
            positions=(total.unsqueeze(-1) - 1 + torch.arange(K + 1)).flatten().long(), logits_indices=torch.arange(rows),
            cu_num_logits=ends, cu_num_logits_np=ends.numpy(), seq_lens=(total + K).int(), seq_lens_cpu_upper_bound=(total +
            K).int(), )  # fmt: skip
        out = runner.rejection_sampler(logits, batch, draft, None)
        behind = torch.arange(K + 1) >= out.num_sampled[:, None]
        for tensor in (draft.float(), out.sampled_token_ids.masked_fill(behind, -1), out.num_sampled):
            digest.update(tensor.contiguous().numpy().tobytes())
        computed = states.num_computed_tokens.gpu
        post_update(
            order, computed, states.last_sampled_tokens, sampler.penalties_state.output_bin_counts, out.sampled_token_ids,
            out.num_sampled, out.num_rejected, torch.tensor([0, K + 1, rows], dtype=torch.int32), states.all_token_ids.gpu,
            states.total_len.gpu,
        )  # fmt: skip
    texts = [states.all_token_ids.gpu[slot, 2 : int(states.total_len.gpu[slot])].tolist() for slot in slots]
    assert budgets is not None
    heard = 0
    while tap is not None and endpoint and subscriber.poll(300):
        heard += len(subscriber.recv()) > 0
    return {
        "digest": digest.hexdigest(),
        "tap": tap is not None,
        "heard": heard,
        "off": off,
        "copied": copied,
        "bound": texts[0],
        "free": texts[1],
        "standing": budgets.set_total("bound", 3),
    }


def without_draft_logits() -> list[int]:
    engine = v2.Engine(4, 6, K)
    for slot in range(4):
        engine.admit(slot, f"r{slot}", [1], ag_rule="interp:w=1", ag_phase="both")
    logits = torch.full((12, 6), -20.0)
    logits[:, 3] = 5.0
    _, number = engine.verify(logits, [[1, 1]] * 4, list(range(4)), draft=False)
    return number.tolist()


def lessons() -> dict[str, Any]:
    """vLLM's own speculator draws drafts from a model whose weights change before they are verified; what a trainer is sent of
    that, with the batch verified in one piece and in chunks. worst: the largest difference between the q that was sent and the one
    that was drafted with."""
    n, v, endpoint = 6, 12, f"ipc://{tempfile.mkdtemp()}/frames"
    generator = torch.Generator().manual_seed(8)
    heat = torch.tensor([1.0, 0.7, 1.0, 0.0, 1.3, 1.0])
    hidden, weights = torch.randn(K, n, 5, generator=generator), torch.randn(5, v, generator=generator)
    seeds, idx = torch.arange(n) + 20, torch.arange(n)
    model = SimpleNamespace(weights=weights.clone())
    drafter = SimpleNamespace(
        use_local_argmax_reduction=False, draft_watermarker=None, use_fp64_gumbel=False, _maybe_predict_acceptance=lambda *_: None,
        compute_draft_logits=lambda states, _: states @ model.weights,
    )  # fmt: skip
    draft, drafts = torch.zeros(n, K, v), torch.zeros(n, K, dtype=torch.int64)
    for k in range(K):
        drafts[:, k] = DraftModelSpeculator.sample_draft(
            drafter, hidden[k], torch.full((n,), 3 + k), idx, heat, seeds, torch.tensor(k), draft
        )
    used = (torch.stack([hidden[k] @ weights for k in range(K)], 1) / torch.where(heat == 0, 1.0, heat)[:, None, None]).softmax(-1)
    model.weights.normal_(generator=generator)  # a publish between drafting and verification
    # many tokens of one row, to see that the q that is sent is the one they are drawn from
    many = DraftModelSpeculator.sample_draft(
        SimpleNamespace(**vars(drafter) | {"compute_draft_logits": lambda *_: (hidden[0, 1] @ weights).repeat(600, 1)}),
        hidden[0], torch.arange(600), torch.ones(600, dtype=torch.int64), heat, seeds, torch.tensor(0), draft.clone(),
    )  # fmt: skip
    capture = Capture(endpoint, window=4, width=0)
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.connect(endpoint)
    capture._socket.poll(5000, zmq.POLLOUT)
    target = torch.randn(n, K + 1, v, generator=generator)
    for k in range(K):  # near enough to the draft for some tokens to be taken
        target[:, k] = hidden[k] @ weights + 0.7 * target[:, k]
    target = target.view(-1, v)
    out: dict[str, Any] = {"drawn": torch.bincount(many, minlength=v).tolist(), "law": used[1, 0].tolist()}
    for name, step in (("whole", n), ("chunks", 2)):
        serving = Serving(SimpleNamespace(device=torch.device("cpu")), TtsSettings.parse({}), capture, lambda _: None, "e")
        serving._live = True
        tap = Tap()
        engine = v2.Engine(n, v, K, tap=tap, serving=serving)
        for slot in range(n):
            engine.admit(
                slot, f"r{slot}", list(range(slot + 2)), ag_rule="cactus:delta=0.3" if slot == 2 else "strict", ag_phase="both"
            )
        engine.draft = draft.clone()
        processed = target.clone() / torch.where(heat == 0, 1.0, heat).repeat_interleave(K + 1)[:, None]

        def verify(
            logits: torch.Tensor, batch: Any, draft_logits: Any = None, invalid: Any = None, *, step: int = step,
            processed: torch.Tensor = processed,
        ) -> Any:  # fmt: skip
            """In chunks of so many requests, as vLLM cuts large batches."""
            found = []
            for first in range(0, n, step):
                at, rows = slice(first, first + step), slice(first * (K + 1), (first + step) * (K + 1))
                ends = batch.cu_num_logits[first : first + step + 1] - first * (K + 1)
                found.append(
                    v2.rejection_sampler.rejection_sample(
                        processed[rows], draft_logits, batch.drafted[rows], ends, batch.pos[rows], batch.idx_mapping[at],
                        batch.expanded_idx_mapping[rows], batch.expanded_local_pos[rows], heat, seeds, K,
                    )
                )  # fmt: skip
            return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])

        engine.runner.rejection_sampler.stock = verify
        p = processed.view(n, K + 1, v)[:, :K].softmax(-1)
        sampled, number = engine.verify(processed, drafts.tolist(), list(range(n)), temperature=heat)
        frames = []
        while socket.poll(300):
            frames.append(wire.decode(socket.recv()))
        rows = [row for frame in frames for row in frame.rounds]
        sent = {row.request: row for row in rows}
        told = {one.request: one for frame in tap.frames for one in frame}
        out[name] = {
            "frames": len(frames), "requests": [row.request for row in rows], "failed": serving.failed,
            "tokens": [row.tokens for row in rows], "starts": [[row.start, row.since, row.output] for row in rows],
            "drafted": [row.drafted for row in rows] == drafts.tolist(),
            "out": [row.out for row in rows] == [t[:k] for t, k in zip(sampled.tolist(), number.tolist(), strict=True)],
            "worst": max(float((sent[f"r{i}"].laws.draft().logp.exp() - used[i]).abs().max()) for i in range(n)),
            "worst_p": max(float((sent[f"r{i}"].laws.target().logp.exp() - p[i]).abs().max()) for i in range(n)),
            "changed": float((torch.stack([hidden[k] @ model.weights for k in range(K)], 1).softmax(-1) - used).abs().max()),
            # strict rows up to the first rejected one: the coin against the ratio of what was sent decides as vLLM did
            "decided": [
                [bool(told[f"r{i}"].rows.would[j]), j < told[f"r{i}"].accepted]
                for i in (0, 1, 4, 5) for j in range(min(told[f"r{i}"].accepted + 1, K))
            ],
            "ratios": max(
                abs(told[f"r{i}"].rows.strict[j] - min(1.0, float(p[i, j, x] / used[i, j, x])))
                for i in (0, 1, 4, 5) for j, x in enumerate(drafts[i].tolist())
            ),
        }  # fmt: skip
    capture.close()
    socket.close()
    return out


def broken_rows() -> dict[str, Any]:
    """First tokens of requests whose draft was made by weights of NaN, with the seam of an engine that has trained its draft and
    with that of one that does not; then sound rows beside broken ones."""
    p, q = (t.float() for t in distributions(11))
    n, out = 150, {}
    x = torch.multinomial(q, n * K, replacement=True, generator=torch.Generator().manual_seed(2)).view(n, K).tolist()
    trained, not_yet = (SimpleNamespace(capturing=False, published=published) for published in (True, False))
    for name, serving in (("trained", trained), ("not yet", not_yet), ("plain", None)):
        for bad in (torch.nan, torch.inf):
            engine = v2.Engine(n, len(p), K, serving=serving)
            engine.draft[:] = q.log()
            engine.draft[: n - 10] = bad
            for slot in range(n):
                engine.admit(slot, f"r{slot}", [1])
            sampled, number = engine.verify(p.log().repeat(n * (K + 1), 1), x, list(range(n)), seed=6)
            first = sampled[: n - 10, 0]
            out[f"{name} {bad}"] = {
                "counts": torch.bincount(first.clamp(0, len(p) - 1), minlength=len(p)).tolist(),
                "accepted": int((number[: n - 10] > 1).sum()), "sound": [r[:k] for r, k in zip(sampled[-10:].tolist(),
                number[-10:].tolist(), strict=True)],
            }  # fmt: skip
    return out


def warmed_up() -> dict[str, Any]:
    """What our kernels are launched with in steps of every kind, as Triton tells compiled kernels apart (types, compile-time
    constants, and of a pointer whether it is a multiple of 16 bytes), against what warming up has launched. Every index is a slice
    of an odd offset, as in a chunk of requests. bare: what was compiled while a request waited."""
    launched: set[tuple[Any, ...]] = set()
    run = v2.interpreter.InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: Any, **constants: Any) -> Any:
        if self.fn.__module__.startswith("engine_plugins"):
            anywhere = self.kwargs.get("do_not_specialize_on_alignment") or ()
            kinds = tuple(
                native_specialize_impl(CUDABackend, a, False, True, name not in anywhere)
                for name, a in zip(self.arg_names, args, strict=False)
            )
            launched.add((self.fn.__name__, kinds, tuple(sorted(constants.items()))))
        return run(self, *args, grid=grid, warmup=warmup, **constants)

    v2.interpreter.InterpretedFunction.run = recorded

    def odd(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:1], tensor])[1:]

    v, out = 10, {}
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for kept in (True, False):
                tap = Tap()
                serving = SimpleNamespace(capturing=False, published=True)
                engine = v2.Engine(4, v, K, markers=MARKERS, tap=tap, serving=serving)
                engine.enable_budgets(ours=True, forced=[5])
                engine.draft = torch.randn(4, K, v).to(dtype)
                launched.clear()
                engine.seam.warm_up(v, engine.draft if kept else None, K, (dtype,))
                known = set(launched)
                for slot, rule in enumerate(("cactus:delta=0.2", "lenience:l=0.4", "strict", "fuzzy:0.05")):
                    engine.admit(slot, f"r{slot}", [1, 4], ag_rule=rule, ag_phase="think", ag_think_tokens=9)
                launched.clear()
                for listened in (True, False):
                    tap.wanted = listened
                    for order in ([0, 1, 2, 3], [2]):  # with requests that relax, and the model's own logits without any
                        logits = torch.randn(len(order) * (K + 1) + 1, v).to(torch.float32 if len(order) > 1 else dtype)
                        for part, there in ((logits[:-1], torch.clone), (logits[1:], odd)):
                            engine.verify(part, [[1, 2]] * len(order), order, draft=kept, narrow=True, there=there)
                out[f"{dtype} {'with' if kept else 'without'} draft"] = {
                    "launched": len(launched), "bare": [str(one) for one in launched - known],
                }  # fmt: skip
    finally:
        v2.interpreter.InterpretedFunction.run = run
    return out


def no_waiting() -> dict[str, Any]:
    """Steps of every kind on a device that is not there, where a wait of the host is an error: rules, filter, phase, budget,
    telemetry and TTS; then faults of each kind, which have to be noticed."""
    v, endpoint = 12, f"ipc://{tempfile.mkdtemp()}/frames"
    generator = torch.Generator().manual_seed(2)
    rules = (
        "cactus:delta=0.2",
        "lenience:l=0.4",
        "strict",
        "typical:eps=0.09,delta=0.3",
        "r-fuzzy:T=0.3",
        "interp:w=1",
        "casc-tok-v3:0.3",
    )
    capture = Capture(endpoint, window=16, width=4)
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.connect(endpoint)
    capture._socket.poll(5000, zmq.POLLOUT)
    events: list[Any] = []
    out: dict[str, Any] = {"caught": {}}

    def steps(mutate: Any = None, rule: str = "", choice: str = "interpret", listened: bool = True) -> tuple[Any, Any]:
        tap = Tap()
        tap.wanted = listened
        serving = Serving(SimpleNamespace(device=torch.device("cpu")), TtsSettings.parse({}), capture, events.append, "e")
        serving._live = serving.published = True
        v2.os.environ["AG_KERNELS"] = choice
        engine = v2.Engine(8, v, K, markers=MARKERS, tap=tap, serving=serving)
        v2.os.environ["AG_KERNELS"] = "interpret"
        engine.enable_budgets(ours=True, forced=[5])
        engine.draft = torch.randn(8, K, v, generator=generator)
        engine.draft[4, 1] = torch.nan  # weights that were trained to NaN
        engine.move(fake_device.DEVICE, fake_device.there)
        for slot, one in enumerate(rules):
            with torch._C.DisableTorchFunction():  # the request's own record, which vLLM writes
                engine.states.prompt_len.gpu[slot] = engine.states.total_len.gpu[slot] = 2
                engine.states.prompt_len.np[slot] = 2
                engine.states.all_token_ids.gpu[slot, :2] = torch.tensor([1, 4], dtype=torch.int32)
            engine.states.index_to_req_id[slot] = f"r{slot}"
            params = SimpleNamespace(
                extra_args={"ag_rule": rule or one, "ag_phase": "both" if slot % 2 else "think", "ag_think_tokens": 3},
                thinking_token_budget=None, temperature=1.0,
            )  # fmt: skip
            engine.budget.add_request(slot, params)
            engine.slots.admit(slot, params)
        if mutate is not None:
            mutate(engine)
        with fake_device.on_a_device():
            for order in ([0, 1, 2, 3, 4, 5, 6], [2], [6, 0, 3]):
                drafts = [[1, 2], [3], []] if len(order) == 3 else [[1, 2][: 2 - (slot == 3)] for slot in order]  # ragged
                rows = sum(len(d) + 1 for d in drafts)
                logits = fake_device.there(torch.randn(rows, v, generator=generator))
                mapping = torch.tensor(order)
                ctx = SimpleNamespace(
                    idx_mapping=fake_device.there(mapping), idx_mapping_np=mapping.numpy(),
                    expanded_idx_mapping=fake_device.there(mapping.repeat_interleave(torch.tensor([len(d) + 1 for d in drafts]))),
                    expanded_local_pos=fake_device.there(torch.cat([torch.arange(len(d) + 1) for d in drafts])),
                    input_ids=fake_device.there(torch.ones(rows, dtype=torch.int32)),
                )  # fmt: skip
                engine.slots.flush()
                engine.budget.apply(logits, ctx)
                engine.verify(logits, drafts, order, narrow=True, there=fake_device.there)
        engine.seam.outbox.close()
        return tap, serving

    tap, serving = steps()
    out["frames"] = [[request.request for request in frame] for frame in tap.frames]
    out["failed"] = serving.failed
    lessons: list[Any] = []
    while socket.poll(300):
        lessons.append([row.request for row in wire.decode(socket.recv()).rounds])
    out["lessons"] = lessons
    _, serving = steps(listened=False)
    out["failed"] += serving.failed

    def reads(engine: Any) -> None:
        stock = engine.seam._rewrite
        engine.seam._rewrite = lambda given, target, acting: (bool(target.isnan().any()), stock(given, target, acting))[1]

    def looks_for_rows(engine: Any) -> None:
        stock = engine.seam._rewrite
        engine.seam._rewrite = lambda given, target, acting: (target[target[:, 0] > 0], stock(given, target, acting))[1]

    def sends_at_once(engine: Any) -> None:
        engine.seam.outbox.send = lambda tensors, deliver: deliver([t.cpu() for t in tensors])

    def from_pageable_memory(engine: Any) -> None:
        engine.slots.staged = lambda values: torch.from_numpy(values).to(engine.slots.device)

    def asks_how_long(engine: Any) -> None:
        lessons = engine.seam._lessons
        stock = lessons._gather
        lessons._gather = lambda *given: (engine.states.total_len.gpu.tolist(), stock(*given))

    faults: dict[str, dict[str, Any]] = {
        **{fault.__name__: {"mutate": fault} for fault in (reads, looks_for_rows, sends_at_once, from_pageable_memory)},
        "a rule in torch": {"rule": "mentored:D=0.1"}, "the twins": {"choice": "0"},
    }  # fmt: skip
    for name, how in faults.items():
        try:
            steps(**how)
        except fake_device.HostWaits as error:
            out["caught"][name] = str(error)
    _, serving = steps(mutate=asks_how_long)
    out["caught"]["asks_how_long"] = serving.failed
    capture.close()
    socket.close()
    return out


def think(markers: ThinkMarkers, tokens: list[int]) -> int:
    tracker = PhaseTracker(markers, [markers.start[-1]] if len(markers.start) == 1 else list(markers.start))
    tracker.update(tokens)
    return tracker.think


def budgets() -> dict[str, Any]:
    """Generations against a limit of 7, with and without drafts, under vLLM's own state and under ours; then what only ours
    does."""
    out: dict[str, Any] = {}
    for ours in (False, True):
        for drafts in (False, True):
            for name, forced in (("marker", [5]), ("phrase", [9, 5])):
                engine = v2.Engine(2, 12, 3, markers=MARKERS)
                engine.enable_budgets(ours=ours, forced=forced)
                engine.admit(0, "r0", [1, 4], budget=7)
                text = engine.generate(0, lambda _: 8, 6 if drafts else 12, drafts=drafts)
                out[f"{'ours' if ours else 'stock'} {name} {'drafts' if drafts else 'alone'}"] = text
    engine = v2.Engine(3, 12, 3, markers=MARKERS)
    engine.enable_budgets(ours=True, forced=[5])

    def two_blocks(tokens: list[int]) -> int:
        """Thinks 6 tokens, closes, answers 2, thinks again for as long as it may."""
        return 5 if len(tokens) == 8 else 4 if len(tokens) == 11 else 8

    engine.admit(0, "two", [1, 4], ag_think_tokens=10)
    out["total"] = engine.generate(0, two_blocks, 12)
    engine.admit(1, "chatcmpl-mine-0123abcd", [1, 4])
    before = engine.generate(1, lambda _: 8, 2)
    out["unlimited"] = len(before)
    out["set"] = engine.budget.set_total("mine", 11)
    out["needs"] = bool(engine.sampler.needs_logits_processing[1])
    after = engine.generate(1, lambda _: 8, 1)
    # preempted: the slot goes, the request comes back in another one, with what it had written as part of its prefill
    del engine.states.req_id_to_index["chatcmpl-mine-0123abcd"], engine.states.index_to_req_id[1]
    engine.admit(2, "chatcmpl-mine-0123abcd", [1, 4])
    whole = [1, 4, *after]
    engine.states.all_token_ids.gpu[2, : len(whole)] = torch.tensor(whole, dtype=torch.int32)
    engine.states.total_len.gpu[2] = len(whole)
    out["resumed"] = engine.generate(2, lambda _: 8, 4)
    out["unknown"] = engine.budget.set_total("nobody", 3)
    engine.slots.forget(["chatcmpl-mine-0123abcd"])
    out["forgotten"] = engine.slots.changed
    return out


def phases() -> list[bool]:
    """The device's count of the trace against `PhaseTracker`, over random texts, drafts and markers of one and two tokens, read in
    one block and in many."""
    generator = torch.Generator().manual_seed(4)
    same, whole = [], v2.request_slots.phases.SCAN
    for markers, block in itertools.product((MARKERS, ThinkMarkers((4, 3), (5, 3))), (2, 4, whole)):
        v2.request_slots.phases.SCAN = block
        engine = v2.Engine(8, 8, 3, markers=markers)
        text = torch.randint(2, 7, (8, 40), generator=generator)
        prompts = [0 + i for i in (1, 4, 7, 10, 2, 9, 3, 5)]
        trackers = []
        for slot, length in enumerate(prompts):
            engine.admit(slot, f"r{slot}", text[slot, :length].tolist())
            engine.states.all_token_ids.gpu[slot, :40] = text[slot].int()
            trackers.append(PhaseTracker(markers, text[slot, :length].tolist()))
        engine.slots.flush()
        for step in range(4):
            drafted = torch.randint(2, 7, (8, 4), generator=generator)
            lengths = [length + 5 * step for length in prompts]
            engine.states.total_len.gpu[:] = torch.tensor(lengths, dtype=torch.int32)
            order = torch.arange(8)
            engine.slots.advance(order)
            inside = engine.slots.ahead(order, torch.arange(0, 33, 4), drafted.flatten()).view(8, 4)
            for slot, tracker in enumerate(trackers):
                tracker.update(text[slot, prompts[slot] : lengths[slot]].tolist())
                same.append([bool(i) for i in inside[slot, :3]] == tracker.ahead(drafted[slot, 1:].tolist()))
                same.append(engine.slots.standing(slot)[0] == tracker.think)
    return same


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)
    rest = (
        strict_beside_relaxed,
        telemetry,
        own_sampler,
        installed,
        without_draft_logits,
        budgets,
        phases,
        lessons,
        broken_rows,
        warmed_up,
        no_waiting,
    )
    with torch.inference_mode():
        alone = "laws" in sys.argv[2:]
        out = {"laws": laws(int(sys.argv[1]), RULES if alone else (*RULES, *FILTERED))}
        if not alone:
            out["exact"] = dict(zip((*RULES, *FILTERED), exact((*RULES, *FILTERED)), strict=True))
            out |= {scenario.__name__: scenario() for scenario in rest}
    print("RESULT" + json.dumps(out))


if __name__ == "__main__":
    main()
