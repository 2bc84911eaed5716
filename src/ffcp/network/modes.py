"""Torch's modes of one thread: gradients on or off, never inference mode, and autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


_DEVICES = tuple(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
    if torch.amp.is_autocast_available(device)
)


def autocast(model: nn.Module) -> str:
    """Return in which types autocast lets a model compute in this thread; empty where it is off.

    Autocast of devices that the model is not on changes nothing.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast(nn.Linear(1, 1))
    'cpu bfloat16'
    >>> autocast(nn.Linear(1, 1))
    ''
    """
    on = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not on or not getattr(type(model), "computes", True):  # see ffcp.Stored
        return ""
    used = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} or {*on}
    kinds = {device: str(torch.get_autocast_dtype(device)).removeprefix("torch.") for device in on}
    return ", ".join(f"{device} {kinds[device]}" for device in on if device in used)


def checked_autocast(kind: str) -> str:
    """Refuse, by ValueError, what :func:`autocast` cannot have returned."""
    for part in kind.split(", ") if kind else ():
        device, _, name = part.partition(" ")
        if not device.isalnum() or not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"expected a device and a type for autocast, got {part!r}")
    return kind


def outside_inference_mode() -> AbstractContextManager[None]:
    """Leave the caller's inference_mode, if it is on: what is made inside outlives it.

    >>> with torch.inference_mode(), outside_inference_mode():
    ...     torch.ones(1).is_inference()
    False
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


class gradients:  # noqa: N801 - reads as a function, like torch.no_grad
    """Set whether graphs are built, whatever the caller has set, and set it back afterwards.

    The caller's inference_mode is left meanwhile: what is made inside could never enter a graph.
    One block in place of torch's two or three, since every batch enters it.

    >>> with torch.inference_mode(), gradients(True):
    ...     torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    (True, False)
    """

    __slots__ = ("_before", "_enabled", "_outside")

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._outside: torch.inference_mode | None = None

    def __enter__(self) -> None:
        if torch.is_inference_mode_enabled():
            self._outside = torch.inference_mode(False)
            self._outside.__enter__()
        self._before = torch.is_grad_enabled()
        if self._before != self._enabled:
            torch.set_grad_enabled(self._enabled)

    def __exit__(self, *error: object) -> None:
        if self._before != self._enabled:
            torch.set_grad_enabled(self._before)
        if self._outside is not None:
            self._outside.__exit__(None, None, None)
            self._outside = None
