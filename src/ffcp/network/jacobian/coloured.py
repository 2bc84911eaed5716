"""Jacobian colouring: outputs that share no feature position share one backward pass.

An output of a convolutional head sees only a window of the feature map. A backward pass that
starts at several outputs adds up their gradients; if their windows do not overlap, nothing is
added to anything, and every gradient can be read off at its own window. A 3x3 convolution needs
9 passes per channel in place of height x width, and the result is exact.

The windows are measured, not guessed: a NaN at one position of the feature reaches the outputs
that are computed from it, through strides, dilation, padding, pooling, interpolation and skip
connections alike, whatever the weights are. A head can hide a NaN (``torch.where(x > 0, x, 0)``
does), so on first use some outputs are compared with backward passes of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ffcp.network import heads, inputs
from ffcp.network.features import Tapped
from ffcp.network.jacobian.norms import reached, wide


class Group(NamedTuple):
    """Positions along one axis that share a backward pass, and the window of each.

    ``window`` has a row for each position; rows are filled up with the number of feature
    positions, which stands for an extra position that is always zero.
    """

    positions: Tensor
    window: Tensor


@dataclass
class Colours:
    """How the outputs of a head divide into groups with disjoint windows.

    ``axes`` holds the groups of every spatial axis; one group of each, and one channel, make a
    backward pass. ``compared`` says whether the windows have been found right.
    """

    axes: tuple[tuple[Group, ...], ...]
    channels: int
    compared: bool = False

    @property
    def passes(self) -> int:
        """Backward passes that all outputs need together."""
        return self.channels * math.prod(len(axis) for axis in self.axes)

    def each(self) -> Iterator[tuple[int, tuple[Group, ...]]]:
        """Give the passes: a channel, and a group for every axis."""
        return itertools.product(range(self.channels), itertools.product(*self.axes))


def groups(seen: Tensor) -> tuple[Group, ...]:
    """Divide the positions of an axis greedily, so that windows in a group do not overlap.

    ``seen[r, i]`` says whether output position r sees feature position i.

    >>> seen = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    >>> [group.positions.tolist() for group in groups(seen)]
    [[0, 2], [1]]
    """
    overlap = (seen.double() @ seen.double().T > 0).cpu()
    colours: list[int] = []
    for row in range(len(seen)):
        taken = {colours[other] for other in overlap[row, :row].nonzero()[:, 0].tolist()}
        colours.append(next(colour for colour in itertools.count() if colour not in taken))
    found = torch.tensor(colours, device=seen.device)
    return tuple(
        _group(seen, (found == colour).nonzero()[:, 0]) for colour in range(max(colours) + 1)
    )


def _group(seen: Tensor, positions: Tensor) -> Group:
    own = seen[positions]
    width = max(1, int(own.sum(dim=1).max()))
    # Sorting brings the seen positions, which are marked 0, to the front in their order.
    order = (~own).byte().argsort(dim=1, stable=True)[:, :width]
    window = order.where(own.gather(1, order), seen.shape[1])
    return Group(positions, window)


Backward = Callable[[Tensor], Tensor]
_COMPARED = 8  # outputs
_NUMBERS_AT_ONCE = 2**23  # 32 MB of float32
_Key = tuple[Any, ...]
_KNOWN: WeakKeyDictionary[nn.Module, dict[_Key, Colours | None]] = WeakKeyDictionary()


def colours(model: nn.Module, x: Any, name: str) -> Colours | None:
    """Find the colours of the head behind a feature, for inputs of the shape of ``x``.

    ``None`` where feature and output are not maps with the same number of spatial axes. What was
    found is remembered for as long as the model lives.

    >>> model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 5, 3, padding=1))
    >>> colours(model, torch.zeros(1, 1, 9), "0").passes  # 3 for each of 5 channels
    15
    """
    shapes = tuple((key, tensor.shape[1:]) for key, tensor in inputs.leaves(x))
    known = _KNOWN.setdefault(model, {})
    key = (name, shapes, str(model))  # the text of a model tells its layers and their settings
    if key not in known:
        known[key] = _found(model, inputs.take(x, slice(0, 1)), name)
    return known[key]


def _found(model: nn.Module, x: Any, name: str) -> Colours | None:
    with heads.behind(model, x, name) as (values, output):
        feature, shape = values[0], output(*values).shape
        dimensions = feature.dim() - 2  # rows and channels apart
        if len(values) != 1 or dimensions < 1 or len(shape) - 1 < dimensions:
            return None
        # A pass makes some maps of the size of the feature and of the output.
        at_once = max(1, _NUMBERS_AT_ONCE // (feature.numel() + shape.numel()))
        return Colours(
            tuple(groups(_seen(output, feature, axis, at_once)) for axis in range(-dimensions, 0)),
            channels=shape[1 : len(shape) - dimensions].numel(),
        )


def _seen(output: Callable[..., Tensor], feature: Tensor, axis: int, at_once: int) -> Tensor:
    """Probe which output positions along an axis react to which feature positions.

    One row of a batch for each feature position: a NaN in that slice of the feature.
    """
    reached = []
    for positions in torch.arange(feature.shape[axis], device=feature.device).split(at_once):
        poisoned = feature.repeat(len(positions), *[1] * (feature.dim() - 1))
        rows = torch.arange(len(positions), device=feature.device)
        poisoned.movedim(axis, 1)[rows, positions] = torch.nan
        hit = output(poisoned).isnan().movedim(axis, 1)
        reached.append(hit.flatten(2).any(dim=2) if hit.dim() > 2 else hit)
    return torch.cat(reached).T


def coloured(tap: Tapped, name: str, colours: Colours, norm: float) -> Tensor:
    """Take the norms at a feature with one backward pass per colour."""

    def backward(start: Tensor) -> Tensor:
        gradients = torch.autograd.grad(
            tap.prediction, tap.edges[name], start, retain_graph=True, allow_unused=True
        )
        return reached(name, gradients)[0]

    return norms(backward, tap.prediction, colours, norm)


def norms(backward: Backward, prediction: Tensor, found: Colours, norm: float) -> Tensor:
    """Take the norms of all rows of the Jacobian, in the shape of the prediction.

    ``backward`` gives the gradient at the feature, (n, channels, *map), of the outputs summed
    with given weights.
    """
    maps = (len(prediction), found.channels, *prediction.shape[-len(found.axes) :])
    start = prediction.new_zeros(maps)
    result = start.new_zeros(maps, dtype=wide(start.dtype))
    for channel, chosen in found.each():
        places = torch.meshgrid(*(group.positions for group in chosen), indexing="ij")
        here: Any = (slice(None), channel, *places)
        start[here] = 1
        gradient = backward(start.view(prediction.shape))
        start[here] = 0
        result[here] = _window_norms(gradient, chosen, norm)
    result = result.view(prediction.shape)
    if not found.compared:
        _compare(backward, result, prediction.dtype, norm)
        found.compared = True
    return result


def _compare(backward: Backward, result: Tensor, dtype: torch.dtype, norm: float) -> None:
    """Compare some outputs, picked at random, with a backward pass of their own."""
    outputs = result.reshape(len(result), -1)
    picked = torch.randint(
        outputs.shape[1], (_COMPARED,), generator=torch.Generator().manual_seed(0)
    )
    for output in picked.tolist():
        start = torch.zeros_like(outputs, dtype=dtype)
        start[:, output] = 1
        gradient = backward(start.view(result.shape)).reshape(len(result), -1).to(result.dtype)
        alone = torch.linalg.vector_norm(gradient, norm, dim=1)
        if not torch.allclose(outputs[:, output], alone, rtol=1e-2, atol=1e-30):
            raise ValueError(
                "this head hides on which positions of the feature its outputs depend (as "
                "torch.where does), so it cannot be coloured: use method='exact' or Sketch"
            )


def _window_norms(gradient: Tensor, chosen: Sequence[Group], norm: float) -> Tensor:
    """Norm of the part of the gradient inside each window of a group."""
    gradient = gradient.to(wide(gradient.dtype))
    inner = tuple(range(1, gradient.dim() - len(chosen)))
    size = gradient.square() if norm == 2 else gradient.abs()
    energy = size.amax(dim=inner) if norm == math.inf else size.sum(dim=inner)
    for axis, group in enumerate(chosen, start=1):
        # The extra position at the end is what short windows are filled up with.
        energy = torch.cat([energy, torch.zeros_like(energy.narrow(axis, 0, 1))], dim=axis)
        parts = energy.index_select(axis, group.window.reshape(-1))
        parts = parts.unflatten(axis, tuple(group.window.shape))
        energy = parts.amax(dim=axis + 1) if norm == math.inf else parts.sum(dim=axis + 1)
    return energy.sqrt_() if norm == 2 else energy
