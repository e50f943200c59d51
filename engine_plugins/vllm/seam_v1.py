"""The verification seam of Model Runner V1: relaxed rules on the stock kernels.

`vllm.v1.sample.rejection_sampler.rejection_sample` is wrapped. For rows of requests with a relaxed rule the target's logits (and,
where the rule says so, the draft's probabilities) are replaced by the rule's pair (p', q') in a *clone*; the stock function
then does the sampling. Strict rows keep their values, and a batch without relaxed rows is passed on untouched, so strict is
stock bit for bit: the random numbers are drawn by the stock function either way.

Rows that stay strict whatever was asked (rules.md, section 6): forced ones (a budget or a grammar wrote a logit of 1e9), -1 drafts,
greedy requests, rows where the target's argmax closes the trace, rows outside the asked phase. A drafted token at -inf is never
accepted.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from agentguard.events import DraftRows, RowFlag, Verified
from engine_plugins import rules
from engine_plugins.vllm.params import RequestParams
from engine_plugins.vllm.phase import PhaseTracker, ThinkMarkers

if TYPE_CHECKING:
    from agentguard.rulespec import RuleSpec
    from engine_plugins.vllm.tap import Tap

FORCED_LOGIT = 1e6  # vLLM writes 1e9 before temperature; no model's logit comes near
STRICT = "strict"


@dataclass(slots=True)
class _Request:
    """What the seam keeps for a running request."""

    params: RequestParams
    rule: rules.FilteredRule | None  # None: strict
    phase: PhaseTracker | None


@dataclass(frozen=True, slots=True)
class _Step:
    """One call, in rows: request r owns rows starts[r] .. starts[r] + counts[r]."""

    ids: list[str]
    counts: list[int]
    requests: list[_Request]
    logits: torch.Tensor  # [rows, V] processed target logits
    drafts: torch.Tensor  # [rows] drafted tokens
    q: torch.Tensor | None  # [rows, V]
    flags: torch.Tensor = field(repr=False)  # [rows] int64 of RowFlag bits

    def spans(self) -> list[tuple[int, int]]:
        spans, start = [], 0
        for count in self.counts:
            spans.append((start, start + count))
            start += count
        return spans


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
    ) -> None:
        self._stock = stock
        self._signature = inspect.signature(stock)
        self._runner = runner
        self._default = default
        self._markers = markers
        self._tap = tap
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
        if not relaxed and not listened:
            return self._stock(*args, **kwargs)
        drafts = bound["draft_token_ids"].long()
        logits: torch.Tensor = bound["target_logits"]
        step = _Step(ids, counts, requests, logits, drafts, bound["draft_probs"], torch.zeros_like(drafts))
        self._mark(step, bound["sampling_metadata"])
        if relaxed:
            bound["target_logits"], bound["draft_probs"] = self._substitute(step)
        out = self._stock(**bound)
        if listened:
            self._publish(step, out)
        return out

    def _request(self, req_id: str) -> _Request:
        known = self._requests.get(req_id)
        if known is None:
            if len(self._requests) > 2 * len(self._runner.requests) + 64:
                self._requests = {k: v for k, v in self._requests.items() if k in self._runner.requests}
            known = self._requests[req_id] = self._admit(req_id)
        return known

    def _admit(self, req_id: str) -> _Request:
        state = self._runner.requests[req_id]
        params = RequestParams.read(state.sampling_params.extra_args, self._default)
        rule = rules.get(params.rule) if params.rule.relaxed else None
        phase = PhaseTracker(self._markers, state.prompt_token_ids or ()) if rule and self._markers else None
        return _Request(params, rule, phase)

    def _mark(self, step: _Step, metadata: Any) -> None:
        """Set the flags of rows that must stay strict."""
        forced = step.logits.amax(-1) >= FORCED_LOGIT
        safe = step.drafts.clamp_min(0).unsqueeze(-1)
        masked = (step.drafts < 0) | (step.logits.gather(-1, safe).squeeze(-1) == -torch.inf)
        step.flags.add_(forced * int(RowFlag.FORCED) + masked * int(RowFlag.MASKED))
        if not metadata.all_random:
            greedy = metadata.all_greedy
            per_request = [greedy or float(t) == 0 for t in (metadata.temperature if not greedy else step.counts)]
            rows = torch.tensor(per_request).repeat_interleave(torch.tensor(step.counts))
            step.flags.add_(rows.to(step.flags.device) * int(RowFlag.GREEDY))
        if self._markers is not None:
            closing = step.logits.argmax(-1) == self._markers.end[0]
            step.flags.add_((closing & ~forced) * int(RowFlag.END_OF_THINK))

    def _substitute(self, step: _Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pair of matrices for the stock function: clones in which relaxed rows hold (p', q')."""
        logits, q = step.logits, step.q
        blocked = step.flags != 0
        wanted = torch.zeros_like(blocked)
        by_rule: dict[str, list[int]] = {}
        for i, (request, (start, end)) in enumerate(zip(step.requests, step.spans(), strict=True)):
            if request.rule is None or start == end:
                continue
            inside = self._in_phase(step.ids[i], request, step.drafts[start:end])
            wanted[start:end] = torch.tensor(inside, device=wanted.device)
            by_rule.setdefault(str(request.params.rule), []).append(i)
        wanted &= ~blocked
        if q is None or not bool(wanted.any()):  # without draft probabilities the rule falls back to strict
            return logits, q
        logits, q = logits.clone(), q.clone()
        spans = step.spans()
        for members in by_rule.values():
            rule = step.requests[members[0]].rule
            assert rule is not None
            mine = torch.zeros_like(wanted)
            for i in members:
                mine[slice(*spans[i])] = True
            rows = (mine & wanted).nonzero().squeeze(-1)
            if rows.numel() == 0:
                continue
            p = step.logits[rows].softmax(-1, dtype=torch.float32)
            (accept, draft), outside = rule.pair(p, q[rows], step.drafts[rows])
            logits[rows] = accept.clamp_min(0).log()
            q[rows] = draft
            step.flags[rows] += int(RowFlag.RELAXED) + outside.long() * int(RowFlag.LOW_SUPPORT)
        return logits, q

    def _in_phase(self, req_id: str, request: _Request, drafts: torch.Tensor) -> list[bool]:
        if request.params.phase == "both":
            return [True] * len(drafts)
        if request.phase is None:  # no markers known: the phase is unknown, so nothing is relaxed
            return [False] * len(drafts)
        request.phase.update(self._runner.requests[req_id].output_token_ids)
        inside = request.phase.ahead(drafts.tolist())
        return inside if request.params.phase == "think" else [not i for i in inside]

    def _publish(self, step: _Step, out: torch.Tensor) -> None:
        """p, q, rank and flags of every draft row, judged on the true target rows, not on the substituted ones."""
        assert self._tap is not None
        accepted = ((out >= 0).sum(-1) - 1).tolist()
        x = step.drafts.clamp_min(0).unsqueeze(-1)
        at = step.logits.gather(-1, x)
        p = (at - step.logits.logsumexp(-1, keepdim=True)).exp().squeeze(-1)
        rank = (step.logits > at).sum(-1)
        q = torch.full_like(p, -1.0) if step.q is None else step.q.gather(-1, x).squeeze(-1)
        # a one-hot draft (no probabilities kept) is accepted with probability p(x)
        strict = (p / q.clamp_min(1e-30)).clamp_max(1) if step.q is not None else p
        columns = [column.tolist() for column in (step.drafts, p, q, rank, strict, step.flags)]
        frames = []
        for i, (start, end) in enumerate(step.spans()):
            if start == end:
                continue
            token, p_, q_, rank_, strict_, flags = (column[start:end] for column in columns)
            flags = [f | (RowFlag.ACCEPTED if j < accepted[i] else 0) for j, f in enumerate(flags)]
            asked = str(step.requests[i].params.rule)
            frames.append(
                Verified(
                    request=step.ids[i],
                    rule_asked=asked,
                    rule_effective=asked if any(f & RowFlag.RELAXED for f in flags) else STRICT,
                    drafted=end - start,
                    accepted=accepted[i],
                    rows=DraftRows(token=token, p=p_, q=q_, rank=rank_, strict=strict_, flags=flags),
                )
            )
        self._steps += 1
        self._tap.publish(time.time(), self._steps, frames)


def install(runner: Any, sampler_module: Any, *, default: RuleSpec, markers: ThinkMarkers | None, tap: Tap | None) -> SeamV1:
    """Wrap `sampler_module.rejection_sample` for this runner; a second worker in the process replaces the first one's seam."""
    stock = sampler_module.rejection_sample
    if isinstance(stock, SeamV1):
        stock = stock._stock
    seam = SeamV1(stock, runner, default=default, markers=markers, tap=tap)
    sampler_module.rejection_sample = seam
    return seam
