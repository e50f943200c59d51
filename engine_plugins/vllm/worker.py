"""The worker class: ``vllm serve … --worker-cls engine_plugins.vllm.worker.Worker``.

After the model is loaded it installs the verification seam, the CPU correction and the telemetry tap. Server-wide settings come in
`--additional-config '{"agentguard": {"rule": "strict", "telemetry": "ipc:///run/…", "engine": "engine-0"}}'`; "tts" holds the knobs
of `agentguard.tts_settings` and "frames" the address of the trainer's socket."""

from __future__ import annotations

import logging
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_input_batch

import engine_plugins.vllm as plugin
from agentguard.errors import ConfigError, PluginError, nearest
from agentguard.events import TtsState
from agentguard.rulespec import RuleSpec
from agentguard.tts_settings import BACKEND, TtsSettings
from engine_plugins.tts import states
from engine_plugins.tts.capture import Capture
from engine_plugins.tts.serving import Serving
from engine_plugins.vllm import budget, compat, cpu_fixes, seam_v1
from engine_plugins.vllm.phase import ThinkMarkers
from engine_plugins.vllm.tap import Tap

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

logger = logging.getLogger("vllm.agentguard")
SETTINGS = ("rule", "telemetry", "engine", "tts", "frames")


class Worker(Base):  # type: ignore[misc]  # vLLM is untyped to us
    """The platform's worker with the seam. Refuses to load where it could only be a silent no-op."""

    ag_tts: Serving | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.weight_transfer_config is not None:
            from engine_plugins.tts import transfer

            transfer.register()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.ag_budgets = install(self)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.ag_tts is not None:
            self.ag_tts.before_step(scheduler_output, set(self.model_runner.requests))
        return super().execute_model(scheduler_output, *args, **kwargs)

    def ag_tts_fixed(self) -> list[str]:
        return self._tts().fixed

    def ag_tts_failed(self) -> str:
        return self._tts().failed

    def ag_tts_attach(self, path: str, settings: dict[str, Any]) -> dict[str, Any]:
        return self._tts().attach(path, settings)

    def ag_tts_publish(self, info: dict[str, Any]) -> dict[str, Any]:
        return self._tts().publish(info)

    def ag_tts_detach(self, state: TtsState, reason: str) -> dict[str, Any]:
        return self._tts().detach(state, reason)

    def ag_tts_note(self, state: TtsState, reason: str) -> None:
        self._tts().note(state, reason)

    def _tts(self) -> Serving:
        if self.ag_tts is None:
            raise PluginError("this engine was started without tts; add it to additional_config.agentguard, or to the recipe")
        return self.ag_tts

    def ag_set_budget(self, request: str, tokens: int) -> dict[str, Any]:
        """Collective RPC, ordered with the steps: see `budget.BudgetHolder.set_total`."""
        return self.ag_budgets.set_total(request, tokens) if self.ag_budgets is not None else {"found": False}


def install(worker: Any) -> budget.BudgetHolder | None:
    """Install everything the plugin does in this worker; returns the holder of think budgets, None where the think markers are
    unknown. Raises PluginError or ConfigError before any request can run."""
    if not plugin.registered:
        raise PluginError(
            "the agentguard plugin was not registered in this process: VLLM_PLUGINS is set without 'agentguard' in it; add it"
        )
    off = [f for f in compat.gate() if not f.on]
    if off:
        raise PluginError(off[0].reason)
    if getattr(worker, "use_v2_model_runner", False):
        raise PluginError(
            "vLLM chose Model Runner V2, which this version of agentguard does not drive yet: rules and telemetry would be a "
            "silent no-op; start the engine with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    config = worker.vllm_config
    if getattr(config.scheduler_config, "async_scheduling", False):
        raise PluginError(
            "async scheduling hides the tokens of the last step from the phase of a request (think or answer) on runner V1; "
            "start the engine with --no-async-scheduling"
        )
    settings = (config.additional_config or {}).get("agentguard", {})
    for key in settings:
        if key not in SETTINGS:
            raise ConfigError(f"additional_config.agentguard.{key}", settings[key], nearest(key, SETTINGS))
    default = RuleSpec.parse(settings.get("rule", "strict"), what="additional_config.agentguard.rule")
    if current_platform.is_cpu():
        cpu_fixes.install(rejection_sampler)
        cpu_fixes.rewind_discarded_draws(worker.model_runner)
        logger.info("agentguard: expand_batch_to_tokens replaced (vllm#55005)")
    markers = _markers(config)
    budgets = None
    if markers is not None:
        closing = budget.Closing.of(config.reasoning_config.reasoning_end_token_ids, markers.end)
        budgets = budget.install(worker.model_runner, gpu_input_batch, markers=markers, closing=closing)
    speculative = config.speculative_config
    if speculative is None:
        logger.info("agentguard: no draft model, so rules and verification telemetry have nothing to act on")
        return budgets
    reason = compat.rules_block_reason()
    if reason:
        raise PluginError(reason)
    method = getattr(speculative, "rejection_sample_method", "standard")
    if method != "standard":
        raise PluginError(f"rejection_sample_method={method!r} changes what acceptance means; use 'standard'")
    if getattr(speculative, "draft_sample_method", None) != "probabilistic":
        logger.warning(
            "agentguard: draft_sample_method is not 'probabilistic', so the drafter keeps no probabilities and every relaxed rule "
            "falls back to strict"
        )
    tap = None
    engine = settings.get("engine", "engine-0")
    if settings.get("telemetry") and worker.is_driver_worker:
        tap = Tap(settings["telemetry"], engine)
    if settings.get("tts") is not None:
        worker.ag_tts = _serving(worker, settings, engine, tap)
    seam_v1.install(worker.model_runner, rejection_sampler, default=default, markers=markers, tap=tap, tts=worker.ag_tts)
    logger.info(
        "agentguard: verification seam installed, default rule %s, telemetry %s, tts %s",
        default, "on" if tap else "off", "on" if worker.ag_tts else "off",
    )  # fmt: skip
    return budgets


def _serving(worker: Any, settings: dict[str, Any], engine: str, tap: Tap | None) -> Serving:
    """TTS in this worker; refused where it could not publish or capture."""
    tts = TtsSettings.parse(settings["tts"])
    if "frames" not in settings:
        raise ConfigError("additional_config.agentguard.frames", None, "tts needs the address of the trainer's socket, ipc:///…")
    backend = getattr(worker.vllm_config.weight_transfer_config, "backend", None)
    if backend != BACKEND:
        raise ConfigError(
            "weight_transfer_config.backend", backend, f"tts publishes through {BACKEND!r}; give it with --weight-transfer-config"
        )
    speculative = worker.vllm_config.speculative_config
    if speculative.method not in ("draft_model", "eagle3"):
        raise ConfigError("speculative_config.method", speculative.method, "tts trains draft_model and eagle3 drafts")
    head = speculative.method == "eagle3"
    if head:
        _trainable(worker.vllm_config)
    capture = Capture(settings["frames"], window=tts.window, width=tts.top_k) if worker.is_driver_worker else None
    fixed = states.fixed(worker.model_runner) if head else ()
    serving = Serving(worker, tts, capture, tap.emit if tap is not None else lambda event: None, engine, fixed)
    if head and capture is not None:
        states.install(worker.model_runner, serving)
    return serving


def _trainable(config: Any) -> None:
    """Raises ConfigError for a head whose hidden states could not be told apart or are elsewhere."""
    for odd, field, value in (
        (config.speculative_config.parallel_drafting, "speculative_config.parallel_drafting", True),
        (config.model_config.uses_mrope, "model", "M-RoPE"),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "pipeline_parallel_size",
            config.parallel_config.pipeline_parallel_size,
        ),
    ):
        if odd:
            raise ConfigError(field, value, "tts cannot train an EAGLE-3 head there; turn tts off")


def _markers(config: Any) -> ThinkMarkers | None:
    """The think markers vLLM derived from `--reasoning-parser` or `--reasoning-config`, None without either."""
    reasoning = config.reasoning_config
    start = getattr(reasoning, "reasoning_start_token_ids", None)
    end = getattr(reasoning, "natural_reasoning_end_token_ids", None)
    if not start or not end:
        logger.warning(
            "agentguard: no --reasoning-parser, so ag_phase=think relaxes nothing and no trace can be closed here; pass one"
        )
        return None
    return ThinkMarkers(tuple(start), tuple(end))
