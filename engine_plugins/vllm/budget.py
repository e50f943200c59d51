"""The think budget inside the engine: a trace is closed after exactly so many tokens, and the number can change meanwhile.

Takes the place of `ThinkingBudgetStateHolder` (vllm/v1/sample/thinking_budget_state.py) on Model Runner V1, behind the same three
calls. Stock keeps counters that are advanced and set back; here each step's forced rows are computed anew from the committed
tokens and the drafts, so a rejected draft, a preemption or a new limit has nothing to repair. Three things stock cannot do follow
from it: a request admitted without a budget can be closed; a natural end is seen when a transition is forced before the
marker; a batch without drafts is forced in the right rows (stock counts draft rows there and writes all forced tokens into row 0).

A forced row is a single legal token (logit 1e9, as stock writes it), which the verification seam keeps strict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from agentguard.request_ids import client_id
from engine_plugins.vllm.phase import PhaseTracker, ThinkMarkers

FORCED = 1e9


@dataclass(frozen=True, slots=True)
class Closing:
    """What a forced close writes: ``before`` (a transition the family wants) + the end marker + ``after`` (what has to follow
    before the answer begins)."""

    before: tuple[int, ...]
    end: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, text: Sequence[int], end: Sequence[int]) -> Closing:
        """Split forced ``text`` at the end marker; a text without it is taken as the transition."""
        for at in range(len(text) - len(end), -1, -1):
            if tuple(text[at : at + len(end)]) == tuple(end):
                return cls(tuple(text[:at]), tuple(end), tuple(text[at + len(end) :]))
        return cls(tuple(text), tuple(end), ())


@dataclass(slots=True)
class Budget:
    """One request's limits and where it stands.

    a_block: `thinking_token_budget`, vLLM's own: tokens since the start marker, those in the prompt included, for each block
    anew. total: generated think tokens of the whole step. None: no limit.
    """

    phase: PhaseTracker
    closing: Closing
    a_block: int | None = None
    total: int | None = None
    owed: tuple[int, ...] = field(default=())
    """Tokens of ``closing.after`` that are still to be forced."""

    @property
    def limited(self) -> bool:
        return self.a_block is not None or self.total is not None or bool(self.owed)

    @property
    def close_at(self) -> int:
        """The block count at which the current block is closed; never before what the prompt brought."""
        phase = self.phase
        limits = [] if self.a_block is None else [self.a_block]
        if self.total is not None:
            limits.append(self.total - phase.before + phase.given)
        return max(phase.given, min(limits)) if limits else 1 << 60

    @property
    def closing_now(self) -> bool:
        """The first forced token has been written and the last one not yet."""
        return bool(self.owed) or (self.phase.inside and self.phase.block > self.close_at)

    def set_total(self, tokens: int) -> None:
        """A new limit, at the earliest now. A close that has begun is carried through."""
        if not self.closing_now:
            self.total = max(tokens, self.phase.think)

    def update(self, output: Sequence[int]) -> None:
        """Read the committed tokens."""
        near = self.phase.inside and self.phase.block + len(output) - self.phase.seen >= self.close_at
        if not self.closing.after or not (near or self.owed):
            self.phase.update(output)
            return
        for token in self.phase.unread(output):
            self._read(token)

    def forced(self, drafts: Sequence[int]) -> dict[int, int]:
        """The forced token of each row that has one; row j is verified behind the first j drafts, row len(drafts) is the bonus.

        Rows behind a draft that a forced row rejects are never read and left alone.
        """
        if not self.owed and (not self.phase.inside or self.phase.block + len(drafts) < self.close_at) and not self._opens(drafts):
            return {}
        ahead = Budget(self.phase.fork(), self.closing, self.a_block, self.total, self.owed)
        out: dict[int, int] = {}
        for row in range(len(drafts) + 1):
            token = ahead._next()
            if token is not None:
                out[row] = token
            if row < len(drafts):
                if token is not None and drafts[row] != token:
                    break
                ahead._read(drafts[row])
        return out

    def _opens(self, drafts: Sequence[int]) -> bool:
        """A block may begin among the drafts."""
        return not self.phase.inside and self.phase.markers.start[-1] in drafts

    def _next(self) -> int | None:
        if self.owed:
            return self.owed[0]
        if not self.phase.inside:
            return None
        at = self.phase.block - self.close_at
        text = self.closing.before + self.closing.end
        # a marker of several tokens that the model itself began at the limit does not shift the text: it is written whole
        return text[at] if 0 <= at < len(text) else None

    def _read(self, token: int) -> None:
        if self.owed:
            self.owed = self.owed[1:] if token == self.owed[0] else ()
            self.phase.read(token)
            return
        closes = self.phase.inside and self.phase.block >= self.close_at + len(self.closing.before)
        self.phase.read(token)
        if closes and not self.phase.inside:
            self.owed = self.closing.after


class BudgetHolder(ThinkingBudgetStateHolder):  # type: ignore[misc]  # vLLM is untyped to us
    """Called by vLLM's V1 samplers in stock's place. ``runner`` is the model runner whose batch it serves."""

    def __init__(self, runner: Any, markers: ThinkMarkers, closing: Closing) -> None:
        self._runner = runner
        self._markers = markers
        self._closing = closing
        self._budgets: dict[str, tuple[Any, Budget]] = {}
        self._plan: dict[int, dict[int, int]] = {}

    def sync_batch(self, batch_update: Any) -> None:
        """Rows are looked up by request id at each step, so a move needs nothing; what is gone is forgotten."""
        if not batch_update:
            return
        live = self._runner.requests
        self._budgets = {k: v for k, v in self._budgets.items() if k in live}
        if batch_update.added:  # its indices are from before the batch was condensed, so the ids are asked
            for req_id in self._runner.input_batch.req_ids:
                if self._limits(live[req_id].sampling_params) != (None, None):
                    self._budget(req_id)

    def has_tracked_requests(self) -> bool:
        return any(budget.limited for _, budget in self._budgets.values())

    def update_state(
        self, output_token_ids: list[list[int]], spec_token_ids: list[list[int]] | None, repeat_indices: Any = None
    ) -> None:
        """Work out the forced rows of this step; ``spec_token_ids`` are the drafts by batch index."""
        self._plan = {}
        index_of = self._runner.input_batch.req_id_to_index
        for req_id, (state, budget) in self._budgets.items():
            index = index_of.get(req_id)
            if index is None or not budget.limited:  # preempted, or finished in this step
                continue
            budget.update(state.output_token_ids)
            drafts = spec_token_ids[index] if spec_token_ids and index < len(spec_token_ids) else ()
            forced = budget.forced(drafts)
            if forced:
                self._plan[index] = forced

    def apply_to_logits(
        self, logits: torch.Tensor, predict_bonus_token: bool, spec_token_ids: list[list[int]] | None
    ) -> torch.Tensor:
        """Write the forced tokens. The rows are the bonus rows (one a request), all draft rows, or in a step without drafts one a
        request."""
        if not self._plan:
            return logits
        counts = [len(drafts) for drafts in spec_token_ids or ()]
        # a verification in which no request has a draft hands over no draft rows at all
        draft_rows = not predict_bonus_token and logits.shape[0] == sum(counts)
        rows: list[int] = []
        tokens: list[int] = []
        for index, forced in self._plan.items():
            mine = counts[index] if index < len(counts) else 0
            offset = sum(counts[:index])
            for row, token in forced.items():
                if draft_rows and row < mine:
                    rows.append(offset + row)
                    tokens.append(token)
                elif not draft_rows and row == mine:
                    rows.append(index)
                    tokens.append(token)
        if rows:
            logits[torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)] = FORCED
        return logits

    def set_total(self, request: str, tokens: int) -> dict[str, Any]:
        """Limit a running request to ``tokens`` think tokens, at the earliest now; in force from the next step on.

        request: the id the engine's client gave (all of its n choices then), or the engine's own. Returns what the request stands
        at: ``found``, ``think`` (generated think tokens), ``inside``, and the ``total`` now in force.
        """
        found: dict[str, Any] = {"found": False}
        for req_id in self._runner.requests:
            if request in (req_id, client_id(req_id)):
                state, budget = self._budget(req_id)
                budget.update(state.output_token_ids)
                budget.set_total(tokens)
                phase = budget.phase
                found = {"found": True, "think": phase.think, "inside": phase.inside, "total": budget.total}
        return found

    def _budget(self, req_id: str) -> tuple[Any, Budget]:
        state = self._runner.requests[req_id]
        known = self._budgets.get(req_id)
        if known is None or known[0] is not state:  # an id may be used again
            a_block, total = self._limits(state.sampling_params)
            phase = PhaseTracker(self._markers, state.prompt_token_ids or ())
            known = self._budgets[req_id] = (state, Budget(phase, self._closing, a_block, total))
        return known

    @staticmethod
    def _limits(params: Any) -> tuple[int | None, int | None]:
        """`thinking_token_budget` and `ag_think_tokens` of a request, None where it names none."""
        if params is None:  # a pooling request
            return None, None
        extra: Mapping[str, Any] = params.extra_args or {}
        return params.thinking_token_budget, extra.get("ag_think_tokens")


def install(runner: Any, module: Any, *, markers: ThinkMarkers, closing: Closing) -> BudgetHolder:
    """Put the holder into the runner's batch, and into every batch the runner makes later.

    module: `vllm.v1.worker.gpu_input_batch`. The runner makes a new batch when the KV cache's block size is known, which is after
    the model is loaded.
    """
    holder = BudgetHolder(runner, markers, closing)

    def create(*_: Any, **__: Any) -> BudgetHolder:
        return holder

    module.maybe_create_thinking_budget_state_holder = create
    batch = runner.input_batch
    batch.thinking_budget_state_holder = holder
    batch.sampling_metadata = batch._make_sampling_metadata()
    return holder
