"""Our backend of vLLM's draft weight update session: weights come out of the trainer's shared memory (slots.py).

Registered as ``agentguard_shm``. Loading goes through the model's own `load_weights` and vLLM's layerwise reload, which re-packs
and re-quantises, and copies into the storage that captured graphs know."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from agentguard.tts_settings import BACKEND
from engine_plugins.tts.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


@dataclass
class ShmInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """Where the slots are. A trainer that was started again has a file of its own."""

    path: str


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which slot holds the weights to load."""

    slot: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a parameter's own weight loader, as the model's `load_weights` made it: for one tensor of the checkpoint."""

    name: str
    layer: Any
    parameter: str
    loader: Any
    rest: tuple[Any, ...]  # behind the parameter and the loaded tensor: the shard of a fused matrix


class ShmWeightTransfer(WeightTransferEngine[ShmInit, ShmUpdate]):  # type: ignore[misc]
    """The first session of a trainer goes through vLLM's layerwise reload and writes down which loader got which tensor. Where no
    layer is quantised, later sessions repeat these calls alone: 4 ms instead of 10 on the reference draft, as no module is walked
    and no copy counted."""

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate
    supports_draft_weight_update = True
    slots: Slots | None = None
    _plan: list[tuple[Any, list[_Call]]] | None = None
    _calls: list[_Call]
    _names: dict[int, str]
    """Names by the identity of the tensors that are being loaded: some models take in all of them before they load the first."""

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        self.slots, self._plan, self._calls = Slots.open(Path(init_info.path)), None, []

    def start_weight_update(self) -> None:
        if self._plan is not None:
            return
        self._calls = []
        with self._restoring():
            initialize_layerwise_reload(self.model)
            for layer in self.model.modules():
                for parameter, tensor in get_layer_tensors(layer).items():
                    if hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = self._written_down(layer, parameter, tensor.weight_loader)

    @contextlib.contextmanager
    def _restoring(self) -> Iterator[None]:
        """Within a layerwise session: a failure gives every layer its tensors back. vLLM leaves them on the meta device, and the
        next forward pass would end the engine."""
        try:
            yield
        except BaseException:
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    _place_kernel_tensors(layer, info)
                    info.reset()
            raise

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the base class synchronises the accelerator here; a copy on the worker's own stream is ordered anyway, and a CPU has none
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdate) -> None:
        if self.slots is None:
            raise RuntimeError("no trainer has announced its weights; call init_weight_transfer_engine first")
        if self._plan is None:
            with self._restoring():
                self.model.load_weights(self._named(self.slots.read(update_info.slot)))
            return
        tensors = dict(self.slots.read(update_info.slot))
        for layer, calls in self._plan:
            _load(layer, calls, tensors)

    def finish_weight_update(self) -> None:
        if self._plan is None:
            with self._restoring():
                finalize_layerwise_reload(self.model, self.model_config)
            self._plan = self._repeatable()
        for head in tied(self.model):
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self.slots = None

    def _named(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self._names, held = {}, []
        for name, tensor in weights:
            held.append(tensor if self.device.type == "cpu" else tensor.to(self.device))
            self._names[id(held[-1])] = name
            yield name, held[-1]

    def _written_down(self, layer: Any, parameter: str, loader: Any) -> Any:
        original = _get_original_loader(getattr(layer, parameter))
        loader = getattr(loader, "ag_inner", loader)  # vLLM keeps what an earlier trainer's session wrapped

        @functools.wraps(loader)
        def write_down(param: Any, loaded: Tensor, *rest: Any) -> Any:
            self._calls.append(_Call(self._names.get(id(loaded), ""), layer, parameter, original, rest))
            return loader(param, loaded, *rest)

        write_down.ag_inner = loader  # type: ignore[attr-defined]
        return write_down

    def _repeatable(self) -> list[tuple[Any, list[_Call]]] | None:
        """The calls by layer; None where repeating them is not all there is to a load."""
        assert self.slots is not None
        by_layer: dict[int, tuple[Any, list[_Call]]] = {}
        for call in self._calls:
            by_layer.setdefault(id(call.layer), (call.layer, []))[1].append(call)
        plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
        if any(type(getattr(layer, "quant_method", None)) not in plain for layer, _ in by_layer.values()):
            return None
        if sorted(c.name for c in self._calls) != sorted(e.name for e in self.slots.entries):
            return None
        return list(by_layer.values())


def _load(layer: Any, calls: list[_Call], tensors: dict[str, Tensor]) -> None:
    """Repeat the calls on one layer: into its own storage, or into an unpacked copy where the CPU keeps a packed one."""
    kernel = dict(layer._parameters)
    packed = [c.parameter for c in calls if kernel[c.parameter].numel() == 0]
    for name in set(packed):
        layer._parameters[name] = materialize_meta_tensor(get_layerwise_info(layer).restore_metadata[0][name])
    try:
        for call in calls:
            call.loader(getattr(layer, call.parameter), tensors[call.name], *call.rest)
        if hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
    finally:
        layer._parameters.update(kernel)


def tied(model: Any) -> list[Any]:
    """Modules that share the weight of another one and keep a packed copy of it, which a reload of the other leaves as it was: on
    CPU the output matrix of a model with tied embeddings (its `cpu_linear`, model_executor/layers/utils.py)."""
    first: dict[int, Any] = {}
    found = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        if first.setdefault(id(weight), module) is not module and hasattr(module, "cpu_linear"):
            found.append(module)
    return found


def register() -> None:
    """Make the backend known to vLLM, once a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransfer)
