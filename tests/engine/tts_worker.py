"""Our worker with a witness around verification, for tests of TTS in one process."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

from engine_plugins.vllm.worker import Worker as Base


class Worker(Base):
    """Sums 1[token = v] - p(v) over the tokens that rows with a draft give (the bonus token's law is drawn elsewhere).

    Given the past a token is drawn from p, so each sum is a martingale; its variance is the sum of p(v) (1 - p(v)).
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.witness_clear()
        self.mutant: Any = None
        (self._watch_v1 if self.ag_slots is None else self._watch_v2)()

    def _watch_v2(self) -> None:
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

        ours = module.rejection_sample

        def witnessed(*args: Any, **kwargs: Any) -> Any:
            names = ours._signature.bind_partial(*args, **kwargs).arguments
            p, ends = names["target_logits"].float().softmax(-1), names["cu_num_logits"].tolist()
            draft, slots = names["draft_logits"], names["idx_mapping"].long()
            self.broken += int((~torch.isfinite(draft[slots].amax(-1))).sum())
            if self.mutant is not None:
                names["draft_logits"] = self.mutant(draft)
            out = ours(**names)
            for n, (tokens, number) in enumerate(zip(out[0].tolist(), out[1].tolist(), strict=True)):
                drafted = ends[n + 1] - ends[n] - 1
                self._note(p[ends[n] : ends[n + 1]], tokens[: min(number, drafted)])
            return out

        module.rejection_sample = witnessed
        self.seam = ours

    def _note(self, p: torch.Tensor, tokens: list[int]) -> None:
        """tokens: those of rows with a draft; p: [rows, V]."""
        for j, token in enumerate(tokens):
            self.excess -= p[j]
            self.excess[token] += 1
            self.variance += p[j] * (1 - p[j])
            self.tokens += 1

    def _watch_v1(self) -> None:
        ours = rejection_sampler.rejection_sample

        def witnessed(*args: Any, **kwargs: Any) -> torch.Tensor:
            names = ours._signature.bind_partial(*args, **kwargs).arguments
            logits, counts = names["target_logits"].float(), names["num_draft_tokens"]
            p = logits.softmax(-1)
            if names["draft_probs"] is not None:
                self.broken += int((~torch.isfinite(names["draft_probs"].sum(-1))).sum())
            if self.mutant is not None and sum(counts) and len(counts) == len(self.model_runner.input_batch.req_ids):
                names["draft_probs"] = self._laws_of_the_mutant(names["draft_token_ids"].tolist(), counts)
            out = ours(**names)
            at = 0
            for request, count in zip(out.tolist(), counts, strict=True):
                self._note(p[at:], [t for t in request[:count] if t >= 0])
                at += count
            return out

        rejection_sampler.rejection_sample = witnessed
        self.seam = ours

    def witness_clear(self) -> None:
        self.excess = torch.zeros(self.vllm_config.model_config.get_vocab_size(), dtype=torch.float64)
        self.variance = torch.zeros_like(self.excess)
        self.tokens = self.broken = 0

    def witness(self) -> dict[str, Any]:
        """|z| of each token with at least 20 expected deviations squared, worst first, and how many tokens were seen."""
        often = (self.variance >= 20).nonzero().squeeze(-1)
        z = self.excess[often] / self.variance[often].sqrt()
        order = z.abs().argsort(descending=True)
        worst = [[int(often[i]), round(float(z[i]), 3)] for i in order[:10]]
        return {"tokens": self.tokens, "symbols": len(often), "broken": self.broken, "worst": worst}

    def capture_again(self) -> None:
        """Frames without a trainer: to see what a paused draft drafts with."""
        self._tts()._live = True

    def draft_addresses(self) -> dict[str, int]:
        """Where the draft's tensors lie, as captured graphs know them."""
        model = self.model_runner.get_draft_model()
        return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def target_sum(self) -> float:
        """Changes when a weight of the target does, packed ones left out."""
        return float(sum(p.detach().double().sum() for p in self.model_runner.get_model().parameters()))

    def epoch(self) -> int:
        return self._tts().epoch

    def set_mutant(self, twin: Any) -> None:
        """Verify with this model's q instead of the one each token was drafted from: the fault the stored q protects from. On V2 a
        function of the stored logits."""
        self.mutant = twin

    def _laws_of_the_mutant(self, drafted: list[int], counts: list[int]) -> torch.Tensor:
        assert self.mutant is not None
        rows, at = [], 0
        with torch.no_grad():
            for name, count in zip(self.model_runner.input_batch.req_ids, counts, strict=True):
                state = self.model_runner.requests[name]
                known = [*(state.prompt_token_ids or ()), *state.output_token_ids]
                ids = torch.tensor([known + drafted[at : at + count - 1]])
                if count:
                    logits = self.mutant.model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0]
                    rows.append(logits.softmax(-1))
                at += count
        return torch.cat(rows)
