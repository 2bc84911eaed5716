"""The kinds of rules that a step of a head can follow: affine, sum, activation, or its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Bounds(NamedTuple):
    """Elementwise lower and upper bounds, both in the shape of what they bound."""

    lower: Tensor
    upper: Tensor


class Lines(NamedTuple):
    """Lines that enclose an activation on an interval; an intercept of None is zero."""

    lower_slope: Tensor
    lower_shift: Tensor | None
    upper_slope: Tensor
    upper_shift: Tensor | None


@dataclass(frozen=True)
class Affine:
    """x -> W x + b. The functions read W and b when called, so training may go on."""

    apply: Callable[[Tensor], Tensor]  # W x + b
    push: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]  # of(W) x, no b
    pull: Callable[[Tensor, torch.Size], Tensor]  # A W, for an input of that shape
    reshapes: bool = False  # a ball stays a ball


@dataclass(frozen=True)
class Sum:
    """sum_i scales[i] * input_i + shift, the inputs all of one shape."""

    scales: tuple[float, ...]
    shift: float = 0.0


@dataclass(frozen=True)
class Activation:
    """An elementwise function, monotone between its turning points."""

    function: Callable[[Tensor], Tensor]
    lines: Callable[[Tensor, Tensor, Tensor], Lines]  # of the low, the high end, the center
    turning: tuple[float, ...] = ()

    def range(self, low: Tensor, high: Tensor) -> Bounds:
        """Give the exact range on an interval: its extremes are at the ends or where it turns."""
        ends = self.function(low), self.function(high)
        if not self.turning:
            return Bounds(*ends)
        lower, upper = torch.minimum(*ends), torch.maximum(*ends)
        for point in self.turning:
            value = self.function(low.new_tensor(point))
            inside = (low <= point) & (point <= high)
            lower = torch.where(inside, torch.minimum(lower, value), lower)
            upper = torch.where(inside, torch.maximum(upper, value), upper)
        return Bounds(lower, upper)


@dataclass(frozen=True)
class Own:
    """A module that bounds itself, over boxes."""

    apply: Callable[[Tensor], Tensor]
    bounds: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


Rule = Affine | Sum | Activation | Own


class UnsupportedError(Exception):
    """Why a layer has no rule; `trace` adds its name and collects all of them."""
