"""The worker class: ``vllm serve … --worker-cls engine_plugins.vllm.worker.Worker``.

After the model is loaded it installs the verification seam of the runner vLLM chose, the CPU correction and the telemetry tap.
Server-wide settings come in `--additional-config '{"agentguard": {"rule": "strict", "telemetry": "ipc:///run/…", "engine":
"engine-0"}}'`; "tts" holds the knobs of `agentguard.tts_settings` and "frames" the address of the trainer's socket."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_input_batch

import engine_plugins.vllm as plugin
from agentguard.errors import ConfigError, PluginError, nearest
from agentguard.events import TtsState
from agentguard.rulespec import RuleSpec
from agentguard.tts_settings import BACKEND, TtsSettings
from engine_plugins import kernels
from engine_plugins.tts import states
from engine_plugins.tts.capture import Capture
from engine_plugins.tts.serving import Serving
from engine_plugins.vllm import budget, compat, cpu_fixes, ranks, seam_v1
from engine_plugins.vllm.phase import ThinkMarkers
from engine_plugins.vllm.processor import AgentGuardParams
from engine_plugins.vllm.tap import Tap

if TYPE_CHECKING:
    from engine_plugins.vllm.budget_v2 import BudgetState
    from engine_plugins.vllm.request_slots import RequestSlots
    from engine_plugins.vllm.seam_v2 import SeamV2

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

logger = logging.getLogger("vllm.agentguard")
# of the rejection sampler: vLLM's, none in an earlier pipeline stage, or ours in front of it
V2_SAMPLERS = ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "builtins", "engine_plugins.vllm.seam_v2")
SETTINGS = ("rule", "telemetry", "engine", "tts", "frames")


class Worker(Base):  # type: ignore[misc]  # vLLM is untyped to us
    """The platform's worker with the seam. Refuses to load where it could only be a silent no-op."""

    ag_tts: Serving | None = None
    ag_slots: RequestSlots | None = None
    ag_seam: SeamV2 | None = None
    ag_found: list[list[Any]] = []  # noqa: RUF012  # replaced by `install`, never changed

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
            known = self.ag_slots.known if self.ag_slots is not None else self.model_runner.requests
            self.ag_tts.before_step(scheduler_output, set(known))
        if self.ag_slots is not None:
            self.ag_slots.forget(scheduler_output.finished_req_ids)
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

    def ag_features(self) -> dict[str, Any]:
        """The runner of this engine, and what works on it: name, on or off, and why."""
        return {"runner": runner_of(self.model_runner), "features": self.ag_found}

    def ag_set_budget(self, request: str, tokens: int) -> dict[str, Any]:
        """Collective RPC, ordered with the steps: see `budget.BudgetHolder.set_total`."""
        return self.ag_budgets.set_total(request, tokens) if self.ag_budgets is not None else {"found": False}


def install(worker: Any) -> budget.BudgetHolder | BudgetState | None:
    """Install everything the plugin does in this worker; returns what holds the think budgets, None where the think markers are
    unknown. Raises PluginError or ConfigError before any request can run."""
    if not plugin.registered:
        raise PluginError(
            "the agentguard plugin was not registered in this process: VLLM_PLUGINS is set without 'agentguard' in it; add it"
        )
    off = [f for f in compat.gate() if not f.on]
    if off:
        raise PluginError(off[0].reason)
    settings = (worker.vllm_config.additional_config or {}).get("agentguard", {})
    for key in settings:
        if key not in SETTINGS:
            raise ConfigError(f"additional_config.agentguard.{key}", settings[key], nearest(key, SETTINGS))
    default = RuleSpec.parse(settings.get("rule", "strict"), what="additional_config.agentguard.rule")
    runner = runner_of(worker.model_runner)
    reason = compat.seam_block_reason(runner)
    if reason:
        raise PluginError(reason)
    found = features(worker, settings, runner)
    for feature in found:
        level = logging.INFO if feature.on or worker.vllm_config.speculative_config is None else logging.WARNING
        state, why = "on" if feature.on else "off", f": {feature.reason}" if feature.reason else ""
        logger.log(level, "agentguard: %s %s%s", feature.name, state, why)
    worker.ag_found = [[f.name, f.on, f.reason] for f in found]
    refused = [f for f in found if not f.on and (f.asked or (f.strict and os.environ.get(compat.STRICT_ENV) == "1"))]
    if refused:
        raise PluginError("; ".join(f"{f.name}: {f.reason}" for f in refused))
    return (_install_v1 if runner == "V1" else _install_v2)(worker, settings, default)


def runner_of(model_runner: Any) -> str:
    """Which of vLLM's model runners this is, told by the object itself: V2 has request states, V1 a persistent batch."""
    if hasattr(model_runner, "req_states"):
        return "V2"
    if hasattr(model_runner, "input_batch") and hasattr(model_runner, "requests"):
        return "V1"
    raise PluginError(f"{type(model_runner).__name__} is neither of the model runners agentguard knows; use vLLM's V1 or V2")


def foreseen(config: Any) -> dict[str, Any]:
    """What `Worker.ag_features` of an engine with this vLLM configuration will say, before there is one; unless its model brings a
    sampler of its own."""
    parts = SimpleNamespace(sampler=SimpleNamespace(logits_processors=[AgentGuardParams()]))
    worker = SimpleNamespace(vllm_config=config, model_runner=parts, device=SimpleNamespace(type=current_platform.device_type))
    runner = "V2" if config.use_v2_model_runner else "V1"
    settings = (config.additional_config or {}).get("agentguard", {})
    return {"runner": runner, "features": [[f.name, f.on, f.reason] for f in features(worker, settings, runner)]}


def features(worker: Any, settings: dict[str, Any], runner: str) -> list[compat.Feature]:
    """What works in this engine and what does not, each with the reason."""
    config = worker.vllm_config
    rules, fatal = _rules_reason(worker, runner)
    budgets = "" if _marked(config) else "no --reasoning-parser, so ag_phase=think relaxes nothing and no trace can be closed here"
    telemetry = _feature("verification telemetry", settings.get("telemetry"), _telemetry_reason(worker, runner))
    device = worker.device.type
    choice = kernels.choose(device)
    if runner == "V1":
        warm = compat.Feature(
            "warm-up", False, "runner V1 compiles its one kernel in the first step somebody listens to", strict=False
        )
    elif config.speculative_config is None:
        warm = compat.Feature("warm-up", True, "without a draft only the think budgets' kernels")
    else:
        warm = compat.Feature("warm-up", True, "all kernels are compiled before the first request")
    return [
        compat.Feature("rules", not rules, rules, asked=fatal),
        compat.Feature("support filter", not rules, rules, asked=fatal),
        compat.Feature("think budgets", not budgets, budgets),
        telemetry,
        compat.Feature(
            "coins in telemetry", telemetry.on, telemetry.reason or "the number that decided a row, as the sampler threw it"
        ),
        _feature("tts", settings.get("tts"), _tts_reason(worker, runner)),
        # off on a GPU is somebody's choice (AG_KERNELS=0), and each step then waits for the device
        compat.Feature("kernels", choice.kernels, choice.reason, strict=device == "cuda"),
        warm,
    ]


def _feature(name: str, setting: Any, reason: str) -> compat.Feature:
    """A feature that is on where it is set, and an error where it is set and cannot be had."""
    if setting is None or setting == "":
        return compat.Feature(name, True, "not asked for")
    return compat.Feature(name, not reason, reason, asked=True)


def _rules_reason(worker: Any, runner: str) -> tuple[str, bool]:
    """Why no rule can relax in this engine, and whether it must not start with that."""
    config = worker.vllm_config
    speculative = config.speculative_config
    if runner == "V1" and getattr(config.scheduler_config, "async_scheduling", False):  # with or without a draft: budgets count too
        return (
            "async scheduling hides the tokens of the last step from the phase of a request (think or answer) on runner V1; "
            "start the engine with --no-async-scheduling"
        ), True
    if speculative is None:
        return "no draft model, so there is nothing to verify", False
    method = getattr(speculative, "rejection_sample_method", "standard")
    if method != "standard":
        return f"rejection_sample_method={method!r} changes what acceptance means; use 'standard'", True
    if runner == "V2" and getattr(config, "watermark_config", None) is not None:
        return "a watermark draws tokens by keys of its own, which a rewritten row would break; start without one", True
    if runner == "V2" and type(getattr(worker.model_runner, "rejection_sampler", None)).__module__ not in V2_SAMPLERS:
        return "this model brings a rejection sampler of its own, which the rules would never reach; start without a draft", True
    if runner == "V2" and _last_stage(worker) and _processor(worker.model_runner) is None:
        return "vLLM did not load the plugin's logits processor, which brings a request's rule; reinstall agentguard-vllm", True
    if getattr(speculative, "draft_sample_method", None) != "probabilistic":
        return (
            "draft_sample_method is not 'probabilistic', so the drafter keeps no probabilities and every relaxed rule falls back "
            "to strict; set it in --speculative-config"
        ), False
    return "", False


def _telemetry_reason(worker: Any, runner: str) -> str:
    if runner == "V2" and getattr(worker.model_runner, "batch_sharder", None) is not None:
        return "batch-sharded sampling spreads the requests over the ranks, and one of them speaks; turn it off"
    return ""


def _tts_reason(worker: Any, runner: str) -> str:
    config, parallel = worker.vllm_config, getattr(worker.vllm_config, "parallel_config", None)
    if config.speculative_config is None:
        return "there is no draft to train; start the engine with --speculative-config"
    for field in ("pipeline_parallel_size", "data_parallel_size"):
        if (size := getattr(parallel, field, 1)) > 1:
            return f"{field}={size}: one draft is trained, on the ranks of one stage of one engine; start without tts"
    if runner == "V2" and getattr(worker.model_runner, "batch_sharder", None) is not None:
        return "batch-sharded sampling spreads the rows over the ranks, and one of them teaches; turn it off"
    if runner == "V2" and getattr(config.speculative_config, "enable_adaptive_verification", False):
        return "adaptive verification leaves the number of a request's rows on the device, and frames need it; turn it off"
    return ""


def _last_stage(worker: Any) -> bool:
    """Is the sampler in this pipeline stage? Runner V1 does not know itself."""
    own = getattr(worker.model_runner, "is_last_pp_rank", None)
    if own is not None:
        return bool(own)
    parallel = getattr(worker.vllm_config, "parallel_config", None)
    if getattr(parallel, "pipeline_parallel_size", 1) == 1:
        return True
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def _install_v1(worker: Any, settings: dict[str, Any], default: RuleSpec) -> budget.BudgetHolder | None:
    config, runner = worker.vllm_config, worker.model_runner
    if current_platform.is_cpu():
        cpu_fixes.install(rejection_sampler)
        cpu_fixes.rewind_discarded_draws(runner)
        logger.info("agentguard: expand_batch_to_tokens replaced (vllm#55005)")
    markers = _markers(config)
    budgets = None
    if markers is not None:
        closing = budget.Closing.of(config.reasoning_config.reasoning_end_token_ids, markers.end)
        budgets = budget.install(runner, gpu_input_batch, markers=markers, closing=closing)
    if config.speculative_config is None:
        return budgets
    tap, engine = _tap(worker, settings)
    if settings.get("tts") is not None:
        worker.ag_tts = _serving(worker, settings, engine, tap)
    seam_v1.install(runner, rejection_sampler, default=default, markers=markers, tap=tap, tts=worker.ag_tts)
    logger.info("agentguard: verification seam installed on runner V1, default rule %s", default)
    return budgets


def _install_v2(worker: Any, settings: dict[str, Any], default: RuleSpec) -> BudgetState | None:
    # none of this can be imported without Triton, which V2 needs too
    from vllm.config.model import PROCESSED_LOGPROBS_MODES
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as verification

    from engine_plugins.vllm import budget_v2, seam_v2
    from engine_plugins.vllm.lessons import Lessons
    from engine_plugins.vllm.request_slots import RequestSlots

    config, runner = worker.vllm_config, worker.model_runner
    if runner.sampler is None:  # an earlier pipeline stage
        return None
    choice = kernels.choose(worker.device.type)
    ranks.agree(ranks.facts(kernels=choice.reason, rule=str(default)), _group(config))
    worker.ag_slots = slots = RequestSlots(runner.req_states, default=default, markers=_markers(config))
    processor = _processor(runner)
    if processor is not None:
        processor.slots = slots
    budgets = budget_v2.install(runner.sampler, slots)
    if config.speculative_config is None or runner.rejection_sampler is None:
        if budgets is not None:
            slots.warm_up(0)
        return budgets
    tap, engine = _tap(worker, settings)
    lessons = None
    if settings.get("tts") is not None:
        worker.ag_tts = _serving(worker, settings, engine, tap)
        lessons = Lessons(worker.ag_tts, slots, runner.req_states)
    worker.ag_seam = seam_v2.install(
        runner, verification, slots, tap=tap, choice=choice, processed_modes=PROCESSED_LOGPROBS_MODES, lessons=lessons
    )
    model = config.model_config
    worker.ag_seam.warm_up(
        runner.vocab_size, runner.speculator.draft_logits, runner.num_speculative_steps, (model.dtype, model.head_dtype)
    )
    logger.info("agentguard: verification seam installed on runner V2, default rule %s, %s", default, choice.reason)
    return budgets


def _processor(runner: Any) -> AgentGuardParams | None:
    """Our logits processor among those of V2's sampler."""
    return next((p for p in getattr(runner.sampler, "logits_processors", ()) if isinstance(p, AgentGuardParams)), None)


def _group(config: Any) -> Any:
    """The CPU group of the ranks that verify the same rows, None for one rank."""
    if config.parallel_config.tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def _tap(worker: Any, settings: dict[str, Any]) -> tuple[Tap | None, str]:
    """The telemetry of this rank, None where it has none to give, and the engine's name."""
    endpoint, engine = settings.get("telemetry"), settings.get("engine", "engine-0")
    if not endpoint or not ranks.speaks(worker, _last_stage(worker)):
        return None, engine
    endpoint, engine = ranks.address(endpoint, engine, getattr(worker.vllm_config, "parallel_config", None))
    return Tap(endpoint, engine), engine


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
        slots = worker.ag_slots
        if slots is not None:
            states.install_v2(worker.model_runner, serving, lambda slot: slots.admitted[slot])
        else:
            states.install_v1(worker.model_runner, serving)
    return serving


def _trainable(config: Any) -> None:
    """Raises ConfigError for a head whose hidden states could not be told apart or are elsewhere."""
    for odd, field, value in (
        (config.speculative_config.parallel_drafting, "speculative_config.parallel_drafting", True),
        (config.model_config.uses_mrope, "model", "M-RoPE"),
        (
            getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1,
            "prefill_context_parallel_size",
            getattr(config.parallel_config, "prefill_context_parallel_size", 1),
        ),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "pipeline_parallel_size",
            config.parallel_config.pipeline_parallel_size,
        ),
    ):
        if odd:
            raise ConfigError(field, value, "tts cannot train an EAGLE-3 head there; turn tts off")


def _marked(config: Any) -> bool:
    reasoning = config.reasoning_config
    return bool(
        getattr(reasoning, "reasoning_start_token_ids", None) and getattr(reasoning, "natural_reasoning_end_token_ids", None)
    )


def _markers(config: Any) -> ThinkMarkers | None:
    """The think markers vLLM derived from `--reasoning-parser` or `--reasoning-config`, None without either."""
    if not _marked(config):
        return None
    reasoning = config.reasoning_config
    return ThinkMarkers(tuple(reasoning.reasoning_start_token_ids), tuple(reasoning.natural_reasoning_end_token_ids))
