"""Our backend of vLLM's draft weight update session: weights come out of the trainer's shared memory (slots.py).

Registered as ``agentguard_shm``. Loading goes through the model's own `load_weights` and vLLM's layerwise reload, which re-packs
and re-quantises, and copies into the storage that captured graphs know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentguard.tts_settings import BACKEND
from engine_plugins.tts.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


@dataclass
class ShmInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """Where the slots are. A trainer that was started again has a file of its own."""

    path: str


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which slot holds the weights to load."""

    slot: int


class ShmWeightTransfer(WeightTransferEngine[ShmInit, ShmUpdate]):  # type: ignore[misc]
    init_info_cls = ShmInit
    update_info_cls = ShmUpdate
    supports_draft_weight_update = True
    slots: Slots | None = None

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        self.slots = Slots.open(Path(init_info.path))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the base class synchronises the accelerator here; a copy on the worker's own stream is ordered anyway, and a CPU has none
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdate) -> None:
        if self.slots is None:
            raise RuntimeError("no trainer has announced its weights; call init_weight_transfer_engine first")
        weights: Iterable[tuple[str, Tensor]] = self.slots.read(update_info.slot)
        if self.device.type != "cpu":
            weights = ((name, tensor.to(self.device)) for name, tensor in weights)
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.slots = None


def register() -> None:
    """Make the backend known to vLLM, once a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransfer)
