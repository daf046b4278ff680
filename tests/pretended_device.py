"""A device that there is not, for machines without one: CUDA's rules over the CPU's arithmetic.

Inside the block a tensor made on, or sent to, `PretendedDevice.DEVICE` says that it is there.
Whatever is computed of it is there as well. An operation between it and a tensor of the host
raises, as it does on a GPU, and so does `Tensor.numpy`. And a call by our own code that makes a
tensor raises unless it says where.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ENGINE = tuple(
    str(Path(__file__).parent.parent / place) for place in ("roles/engines", "roles/diloco")
)
FACTORIES = {
    torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.eye, torch.empty,
    torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.randperm,
    torch.normal, torch.scalar_tensor,
}  # fmt: skip
GET = "__get__"


def tensors_in(value: Any) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case dict():
            yield from tensors_in(list(value.values()))
        case list() | tuple():
            for one in value:
                yield from tensors_in(one)


class NamedDevices(TorchFunctionMode):
    """Only the last of the rules: it counts the calls that say where, and raises for others."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.check(func, kwargs or {})
        return func(*args, **(kwargs or {}))

    def check(self, func: Any, kwargs: dict[str, Any]) -> None:
        caller = sys._getframe(2)
        if func in FACTORIES and caller.f_code.co_filename.startswith(ENGINE):
            self.made += 1
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            assert kwargs.get("device") is not None, f"{where}: {func.__name__} has no device"


class PretendedDevice(NamedDevices):
    DEVICE: ClassVar = torch.device("cuda", 0)

    def __init__(self) -> None:
        super().__init__()
        # kept alive: a pointer is one tensor's for as long as the block lasts
        self._storages: dict[int, Any] = {}
        self._empty: dict[int, Tensor] = {}
        self.operations = 0
        """Between tensors of which one was there."""

    def has(self, tensor: Tensor) -> bool:
        if tensor.is_meta:
            return False
        pointer = tensor.untyped_storage().data_ptr()
        return pointer in self._storages if pointer else id(tensor) in self._empty

    def _take(self, value: Any) -> Any:
        for tensor in tensors_in(value):
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr():
                self._storages[storage.data_ptr()] = storage
            else:
                self._empty[id(tensor)] = tensor
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.check(func, kwargs)
        there = any(self.has(one) for one in tensors_in([*args, kwargs]))
        if getattr(func, "__name__", "") == GET:
            return self._property(func, args, there)
        if func is Tensor.numpy:
            assert not there, "a tensor of the device has no array"
        if func is Tensor.pin_memory:
            return args[0]
        named = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
        named += [torch.device("cpu")] if func is Tensor.cpu else []
        goes = [one for one in named if one.type != "meta"]
        is_sent = bool(goes) and goes[0] == self.DEVICE
        if goes and func in (Tensor.to, Tensor.cpu):
            others = [one for one in args[1:] if not isinstance(one, torch.device)]
            kwargs.pop("device", None)
            copy = args[0].clone().to(*others, **kwargs)
            return self._take(copy) if is_sent else copy
        if is_sent:
            args = tuple("cpu" if one == self.DEVICE else one for one in args)
            kwargs = {k: "cpu" if one == self.DEVICE else one for k, one in kwargs.items()}
        elif there and func is not Tensor.copy_:
            self._check_together(func, args, kwargs)
        value = func(*args, **kwargs)
        return self._take(value) if is_sent or (there and not goes) else value

    def _property(self, func: Any, args: tuple[Any, ...], there: bool) -> Any:
        owner = func.__self__
        if there and owner is Tensor.device:
            return self.DEVICE
        if there and owner in (Tensor.is_cpu, Tensor.is_cuda):
            return owner is Tensor.is_cuda
        value = func(*args)
        return self._take(value) if there else value

    def _check_together(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in([*args, kwargs]):
            if tensor.dim() and tensor.numel() and not tensor.is_meta:
                self.operations += 1
                assert self.has(tensor), (
                    f"{func.__name__} of the device's tensors and the host's"
                )
