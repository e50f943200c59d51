"""A device that is not there: tensors that claim to be on "cuda" and lie in the CPU's memory, and an error for whatever would have
the host wait for a real one.

Inside `on_a_device()` everything that is asked for on "cuda" is an `OnDevice`. Raised is `HostWaits` for a value that is read on
the host (item, tolist, bool, …), for a result whose size only the device knows (nonzero, a mask as an index), for a copy from
pageable memory or back into it, and an error for operands on both sides, as torch raises it. What Triton's interpreter does
with its arguments is a launch, and not looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

DEVICE = torch.device("cuda", 0)
READS = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len_hint__", "nonzero", "argwhere",
    "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero", "__array__", "__repr__", "bincount",
    "__contains__",
}  # fmt: skip


class HostWaits(AssertionError):
    """The host would wait for the device here."""


class OnDevice(Tensor):
    """A tensor of the device that is not there."""


def _plain(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.as_subclass(Tensor)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, tuple | list):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _there(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.as_subclass(OnDevice)
    if isinstance(value, tuple | list):
        return type(value)([_there(v) for v in value])
    return value


def _each(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for one in value:
            yield from _each(one)
    elif isinstance(value, dict):
        yield from _each(list(value.values()))
    else:
        yield value


class _Device(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        values = list(_each([args, kwargs]))
        here = [v for v in values if isinstance(v, OnDevice)]
        if name == "__get__":
            owner = func.__self__.__name__  # type: ignore[attr-defined]
            if here and owner == "device":
                return DEVICE
            if owner == "is_cuda":
                return bool(here)
            found = func(*_plain(args), **_plain(kwargs))
            return _there(found) if here and isinstance(found, Tensor) else found
        pinned = kwargs.pop("pin_memory", False) or name == "pin_memory"
        if name == "pin_memory":
            found = args[0].clone()
            found.pinned = True
            return found
        wants = any(isinstance(v, torch.device | str) and str(v).startswith("cuda") for v in values)
        if here and name in READS:
            raise HostWaits(f"{name} of a tensor on the device")
        if name == "repeat_interleave" and here and "output_size" not in kwargs:
            raise HostWaits("repeat_interleave without output_size")
        if name == "where" and here and len(args) == 1:
            raise HostWaits("where of a condition alone")
        if name in ("__getitem__", "__setitem__", "index_put_", "index_put") and here:
            _index(args[1])
        if name == "copy_":
            return _copied(args[0], args[1], kwargs, func)
        if (
            name == "to"
            and here
            and not wants
            and any(isinstance(v, torch.device) or v == "cpu" for v in _each([args[1:], kwargs]))
        ):
            raise HostWaits("a copy to the host")
        if wants and not here and name in ("to", "tensor", "as_tensor", "cuda"):
            source = args[0]
            quiet = isinstance(source, Tensor) and getattr(source, "pinned", False) and kwargs.get("non_blocking", False)
            if not quiet:
                raise HostWaits(f"{name} onto the device from pageable memory")
        if here and name not in ("__get__", "__set__"):
            there = [v for v in values if isinstance(v, Tensor) and not isinstance(v, OnDevice) and v.dim()]
            if there:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        found = func(*_plain(args), **_plain(kwargs))
        if pinned and isinstance(found, Tensor):
            found.pinned = True  # type: ignore[attr-defined]
            return found
        if name.endswith("_") and not name.startswith("_") and here:
            return args[0]
        return _there(found) if (here or wants) and isinstance(found, Tensor | tuple | list) else found


def _index(index: Any) -> None:
    for one in index if isinstance(index, tuple | list) else (index,):
        if isinstance(one, OnDevice) and _plain(one).dtype in (torch.bool, torch.uint8):
            raise HostWaits("a mask as an index")


def _copied(to: Tensor, source: Tensor, kwargs: dict[str, Any], func: Callable[..., Any]) -> Tensor:
    out, back = isinstance(to, OnDevice), isinstance(source, OnDevice)
    if out != back:
        host = source if out else to
        if not (getattr(host, "pinned", False) and kwargs.get("non_blocking", False)):
            raise HostWaits("a copy between pageable memory and the device")
    func(_plain(to), _plain(source), **kwargs)
    return to


chosen: list[torch.device] = []
"""What threads have set as their device."""
waits: list[bool] = []
"""Waits for an event, whether the waiting thread slept."""


class _Event:
    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waits.append(self.blocking)


@contextlib.contextmanager
def on_a_device() -> Iterator[torch.device]:
    """For the time of a step; yields the device."""
    event, launch, pin = torch.cuda.Event, interpreter.GridExecutor.__call__, Tensor.pin_memory
    set_device, taken = torch.cuda.set_device, chosen.append

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        host = [a for a in args if isinstance(a, Tensor) and not isinstance(a, OnDevice)]
        if host:
            raise RuntimeError("a kernel was given a tensor of the host")
        with torch._C.DisableTorchFunction():
            return launch(self, *_plain(args), **kwargs)

    chosen.clear()
    waits.clear()
    torch.cuda.set_device = taken
    torch.cuda.Event = _Event  # type: ignore[assignment, misc]
    Tensor.pin_memory = torch._C.TensorBase.pin_memory  # type: ignore[method-assign]  # vLLM's CPU worker has it do nothing
    interpreter.GridExecutor.__call__ = launched
    try:
        with _Device():
            yield DEVICE
    finally:
        torch.cuda.set_device = set_device
        torch.cuda.Event = event  # type: ignore[misc]
        Tensor.pin_memory = pin  # type: ignore[method-assign]
        interpreter.GridExecutor.__call__ = launch


def there(tensor: Tensor) -> Tensor:
    """A tensor of the host, on the device; before a step."""
    return tensor.as_subclass(OnDevice)
