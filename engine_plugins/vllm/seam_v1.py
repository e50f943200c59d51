"""The verification seam of Model Runner V1: relaxed rules on the stock kernels.

`vllm.v1.sample.rejection_sampler.rejection_sample` is wrapped. In rows of requests with a relaxed rule, what the rule's pair
(p', q') changes is written over the target's logits and the draft's probabilities; the stock function then does the sampling,
and the logits, which vLLM reports as logprobs afterwards, are put back. Strict rows are not touched, so strict is stock bit for
bit: the random numbers are drawn by the stock function either way. The draft's probabilities are a copy of the step's own
(`_get_spec_decode_draft_probs` in gpu_model_runner.py) and stay changed.

Rows that stay strict whatever was asked (rules.md, section 6): forced ones (a budget or a grammar wrote a logit of 1e9), -1 drafts,
greedy requests, rows where the target's argmax closes the trace, rows outside the asked phase. A drafted token at -inf is never
accepted.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from agentguard.events import RowFlag
from engine_plugins import rules
from engine_plugins.kernels.batch import FORCED_LOGIT
from engine_plugins.tts.capture import Seen
from engine_plugins.vllm.observe import Coins, Described, Rounds, at_end, describe, entropy
from engine_plugins.vllm.params import RequestParams
from engine_plugins.vllm.phase import PhaseTracker, ThinkMarkers

if TYPE_CHECKING:
    from agentguard.rulespec import RuleSpec
    from engine_plugins.tts.serving import Serving
    from engine_plugins.vllm.tap import Tap


@dataclass(slots=True)
class _Request:
    """What the seam keeps for a running request."""

    state: Any  # the runner's own record of the request
    params: RequestParams
    rule: rules.FilteredRule | None  # None: strict
    phase: PhaseTracker | None
    asked: str  # the rule's text


@dataclass(frozen=True, slots=True)
class _Step:
    """One call: the drafts of all requests as rows, one after the other."""

    ids: list[str]
    counts: list[int]
    requests: list[_Request]
    logits: torch.Tensor  # [rows, V] processed target logits
    drafts: torch.Tensor  # [rows] drafted tokens
    q: torch.Tensor | None  # [rows, V]
    flags: torch.Tensor = field(repr=False)  # [rows] int64 of RowFlag bits
    spans: list[tuple[int, int]] = field(repr=False)  # first and last + 1 row of each request

    def flagged(self, flag: RowFlag) -> torch.Tensor:
        return (self.flags & int(flag)) != 0


class SeamV1:
    """Installed once a worker by `install`; called in place of vLLM's `rejection_sample`."""

    def __init__(
        self,
        stock: Callable[..., torch.Tensor],
        runner: Any,
        *,
        default: RuleSpec,
        markers: ThinkMarkers | None,
        tap: Tap | None,
        coins: Coins,
        tts: Serving | None = None,
    ) -> None:
        self._stock = stock
        self._coins = coins
        self._signature = inspect.signature(stock)
        self._runner = runner
        self._default = default
        self._markers = markers
        self._tap = tap
        self._tts = tts
        self._requests: dict[str, _Request] = {}
        self._steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        counts: list[int] = bound["num_draft_tokens"]
        ids: list[str] = list(self._runner.input_batch.req_ids)
        if len(ids) != len(counts):  # the runner's warm-up calls with a dummy batch
            return self._stock(*args, **kwargs)
        requests = [self._request(i) for i in ids]
        relaxed = any(r.rule is not None for r in requests)
        listened = self._tap is not None and self._tap.wanted
        q: torch.Tensor | None = bound["draft_probs"]
        learned = self._tts is not None and self._tts.capturing
        if self._tts is not None and q is not None:
            _without_broken_rows(q)
        if not relaxed and not listened and not learned:
            return self._stock(*args, **kwargs)
        drafts = bound["draft_token_ids"].long()
        logits: torch.Tensor = bound["target_logits"]
        ends = list(itertools.accumulate(counts))
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        step = _Step(ids, counts, requests, logits, drafts, q, torch.zeros_like(drafts), spans)
        self._mark(step, bound["sampling_metadata"])
        end = self._markers.end[0] if self._markers is not None else None
        described = describe(logits, q, drafts, step.flagged(RowFlag.GREEDY), end) if listened else None
        teaching = self._teach(step) if learned else None
        self._coins.take()
        rewritten: list[rules.Rewritten] = []
        try:
            if relaxed:
                self._relax(step, rewritten)
            out = self._stock(**bound)
        finally:
            for change in rewritten:
                change.restore(logits)
        if described is not None:
            self._publish(step, described, out)
        if teaching is not None:
            assert self._tts is not None
            self._tts.after(teaching, out)
        return out

    def _teach(self, step: _Step) -> Any:
        """Take the laws for the trainer, before a relaxed rule rewrites them."""
        assert self._tts is not None
        seen = [Seen(n, step.ids[n], r.state, *step.spans[n]) for n, r in enumerate(step.requests)]
        return self._tts.before(seen, step.logits, step.q, step.drafts, step.flagged(RowFlag.FORCED))

    def _request(self, req_id: str) -> _Request:
        known = self._requests.get(req_id)
        if known is None or known.state is not self._runner.requests[req_id]:  # an id may be used again
            if len(self._requests) > 2 * len(self._runner.requests) + 64:
                self._requests = {k: v for k, v in self._requests.items() if k in self._runner.requests}
            known = self._requests[req_id] = self._admit(req_id)
        return known

    def _admit(self, req_id: str) -> _Request:
        state = self._runner.requests[req_id]
        params = RequestParams.read(state.sampling_params.extra_args, self._default)
        found = rules.get(params.rule)
        rule = found if found.acts else None
        phase = PhaseTracker(self._markers, state.prompt_token_ids or ()) if rule and self._markers else None
        return _Request(state, params, rule, phase, str(params.rule))

    def _mark(self, step: _Step, metadata: Any) -> None:
        """Set the flags of rows that must stay strict."""
        top = step.logits.amax(-1)
        forced = top >= FORCED_LOGIT
        safe = step.drafts.clamp_min(0).unsqueeze(-1)
        masked = (step.drafts < 0) | (step.logits.gather(-1, safe).squeeze(-1) == -torch.inf)
        step.flags.add_(forced * int(RowFlag.FORCED) + masked * int(RowFlag.MASKED))
        if not metadata.all_random:
            greedy = metadata.all_greedy
            per_request = [True] * len(step.counts) if greedy else (metadata.temperature == 0).tolist()
            rows = torch.tensor(per_request).repeat_interleave(torch.tensor(step.counts))
            step.flags.add_(rows.to(step.flags.device) * int(RowFlag.GREEDY))
        if self._markers is not None:
            # five times as fast as an argmax, which reads the row the same
            closing = step.logits[:, self._markers.end[0]] >= top
            step.flags.add_((closing & ~forced) * int(RowFlag.END_OF_THINK))

    def _relax(self, step: _Step, rewritten: list[rules.Rewritten]) -> None:
        """Write the rules' pairs over the rows they may touch, and say in the flags which these were."""
        q = step.q
        if q is None:  # without draft probabilities a rule falls back to strict
            return
        wanted = torch.zeros_like(step.drafts, dtype=torch.bool)
        by_rule: dict[str, list[int]] = {}
        for i, (request, (start, end)) in enumerate(zip(step.requests, step.spans, strict=True)):
            if request.rule is None or start == end:
                continue
            inside = self._in_phase(step.ids[i], request, step.drafts[start:end])
            wanted[start:end] = torch.tensor(inside, device=wanted.device)
            by_rule.setdefault(request.asked, []).append(i)
        wanted &= step.flags == 0
        for members in by_rule.values():
            rule = step.requests[members[0]].rule
            assert rule is not None
            mine = torch.zeros_like(wanted)
            for i in members:
                mine[slice(*step.spans[i])] = True
            rows = (mine & wanted).nonzero().squeeze(-1)
            if rows.numel() == 0:
                continue
            change = rule.rewrite(step.logits, q, step.drafts, rows)
            step.flags[rows] += torch.where(
                change.unsure, int(RowFlag.UNSURE), int(RowFlag.RELAXED) + change.outside.long() * int(RowFlag.LOW_SUPPORT)
            )
            rewritten.append(change)

    def _in_phase(self, req_id: str, request: _Request, drafts: torch.Tensor) -> list[bool]:
        if request.params.phase == "both":
            return [True] * len(drafts)
        if request.phase is None:  # no markers known: the phase is unknown, so nothing is relaxed
            return [False] * len(drafts)
        request.phase.update(self._runner.requests[req_id].output_token_ids)
        inside = request.phase.ahead(drafts.tolist())
        return inside if request.params.phase == "think" else [not i for i in inside]

    def _publish(self, step: _Step, described: Described, out: torch.Tensor) -> None:
        assert self._tap is not None
        accepted = ((out >= 0).sum(-1) - 1).tolist()
        coins = self._coins.take()
        # all greedy: no coin is thrown, and strict is 0 or 1
        coins = torch.full_like(described.p, 0.5) if coins is None else coins
        ends = described.end.tolist()
        at = [(start, at_end(ends[start:stop], accepted[i])) for i, (start, stop) in enumerate(step.spans)]
        told = [start + row for start, row in at if row >= 0]
        uncertain = torch.full_like(described.p, -1.0)  # known where it is told, a row of each request
        if told:
            uncertain[told] = entropy(step.logits[told])
        columns = torch.stack(
            [
                column.float()
                for column in (
                    step.drafts, described.p, described.q, described.rank, described.strict, coins, step.flags, described.end,
                    uncertain,
                )
            ]
        )  # fmt: skip
        self._steps += 1
        asked = [request.asked for request in step.requests]
        self._tap.publish(time.time(), self._steps, Rounds(step.ids, asked, step.counts, accepted, columns.cpu().numpy()))


def _without_broken_rows(q: torch.Tensor) -> None:
    """Set rows of q that are no law to 0: their token is rejected and the target's own law is drawn from, so what is served stays
    exact. Weights that were trained to NaN leave such rows in the draft's KV cache, also after they have gone. No host sync."""
    q.masked_fill_(~torch.isfinite(q.sum(-1, keepdim=True)), 0.0)


def install(
    runner: Any,
    sampler_module: Any,
    *,
    default: RuleSpec,
    markers: ThinkMarkers | None,
    tap: Tap | None,
    tts: Serving | None = None,
) -> SeamV1:
    """Wrap `sampler_module.rejection_sample` for this runner; a second worker in the process replaces the first one's seam."""
    stock = sampler_module.rejection_sample
    if isinstance(stock, SeamV1):
        stock = stock._stock
    seam = SeamV1(stock, runner, default=default, markers=markers, tap=tap, coins=Coins.record(sampler_module), tts=tts)
    sampler_module.rejection_sample = seam
    return seam
