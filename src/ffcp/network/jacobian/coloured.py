"""Jacobian colouring: outputs that share no feature position share one backward pass.

An output of a convolutional head sees only a window of the feature map. A backward pass that
starts at several outputs adds up their gradients; if their windows do not overlap, nothing is
added to anything, and every gradient can be read off at its own window. A 3x3 convolution needs
9 passes per channel in place of height x width, and the result is exact.

The windows are measured: a NaN at one position of the feature reaches the outputs that are
computed from it, through strides, dilation, padding, pooling, interpolation and skip connections
alike, whatever the weights are. A head can hide a NaN (``torch.where(x > 0, x, 0)`` does), so
the result is proved right on every batch: one more backward pass starts at all outputs at once,
each with a random weight, and its gradient must be what the windows say it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ffcp.batch import is_traced
from ffcp.network import heads, inputs
from ffcp.network.cut import Tapped
from ffcp.network.jacobian.norms import reached, wide
from ffcp.network.model import original


class HiddenWindowsError(ValueError):
    """An output depends on feature positions outside the window that was measured for it."""


_HIDDEN = (
    "this head hides on which positions of the feature its outputs depend (as torch.where does), "
    "so it cannot be coloured: use method='exact' or Sketch"
)


class Group(NamedTuple):
    """Positions along one axis that share a backward pass, and the window of each.

    ``window`` has a row for each position; rows are filled up with the number of feature
    positions, which stands for an extra position that is always zero. ``owner`` gives for every
    feature position the place in ``positions`` of the one that sees it, or their number if none
    does.
    """

    positions: Tensor
    window: Tensor
    owner: Tensor


@dataclass
class Colours:
    """How the outputs of a head divide into groups with disjoint windows.

    ``axes`` holds the groups of every spatial axis; one group of each, and one channel, make a
    backward pass. ``proved`` and ``refuted`` say whether there was a batch on which the windows
    proved right, or wrong.
    """

    axes: tuple[tuple[Group, ...], ...]
    channels: int
    proved: bool = False
    refuted: bool = False
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def passes(self) -> int:
        """Backward passes that all outputs need together."""
        return self.channels * math.prod(len(axis) for axis in self.axes)

    def each(self) -> Iterator[tuple[int, tuple[Group, ...]]]:
        """Return the passes: a channel, and a group for every axis."""
        return itertools.product(range(self.channels), itertools.product(*self.axes))


def groups(seen: Tensor) -> tuple[Group, ...]:
    """Divide the positions of an axis greedily, so that windows in a group do not overlap.

    ``seen[r, i]`` says whether output position r sees feature position i.

    >>> seen = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    >>> [group.positions.tolist() for group in groups(seen)]
    [[0, 2], [1]]
    """
    on_cpu = seen.cpu().double()
    overlap = on_cpu @ on_cpu.T > 0
    colours: list[int] = []
    for row in range(len(seen)):
        taken = {colours[other] for other in overlap[row, :row].nonzero()[:, 0].tolist()}
        colours.append(next(colour for colour in itertools.count() if colour not in taken))
    colour_of = torch.tensor(colours, device=seen.device)
    return tuple(
        _group(seen, (colour_of == colour).nonzero()[:, 0]) for colour in range(max(colours) + 1)
    )


def _group(seen: Tensor, positions: Tensor) -> Group:
    windows = seen[positions]
    width = max(1, int(windows.sum(dim=1).max()))
    # Sorting brings the seen positions, which are marked 0, to the front in their order.
    order = (~windows).byte().argsort(dim=1, stable=True)[:, :width]
    window = order.where(windows.gather(1, order), seen.shape[1])
    owner = windows.byte().argmax(dim=0).where(windows.any(dim=0), len(positions))
    return Group(positions, window, owner)


Output = Callable[..., Tensor]
_NUMBERS_AT_ONCE = 2**23  # 32 MB of float32
_MEASURED: WeakKeyDictionary[nn.Module, dict[Any, Colours | None]] = WeakKeyDictionary()


def colours(model: nn.Module, x: Any, name: str) -> Colours | None:
    """Measure the colours of the head behind a feature, for inputs of the shape of ``x``.

    ``None`` where feature and output are not maps with the same number of spatial axes. The
    answer is remembered for as long as the model lives.

    >>> model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 5, 3, padding=1))
    >>> colours(model, torch.zeros(1, 1, 9), "0").passes  # 3 for each of 5 channels
    15
    """
    shapes = tuple((key, t.shape[1:], t.device) for key, t in inputs.leaves(x))
    measured = _MEASURED.setdefault(original(model), {})  # for all copies at once
    key = (name, shapes, str(model))  # str(model) lists layers and their settings
    if key not in measured:
        measured[key] = _measured(model, inputs.take(x, slice(0, 1)), name)
    return measured[key]


def _measured(model: nn.Module, x: Any, name: str) -> Colours | None:
    with heads.behind(model, x, name) as (values, output):
        feature, shape = values[0], output(*values).shape
        dimensions = feature.dim() - 2  # without rows and channels
        if len(values) != 1 or dimensions < 1 or len(shape) - 1 < dimensions:
            return None
        # A pass makes some maps of the size of the feature and of the output.
        at_once = max(1, _NUMBERS_AT_ONCE // (feature.numel() + shape.numel()))
        channels = shape[1 : len(shape) - dimensions].numel()
        try:
            seen = [_seen(output, feature, axis, at_once) for axis in range(-dimensions, 0)]
        except Exception:  # whatever a user's layers do when they meet a NaN
            return Colours((), channels, refuted=True)
        return Colours(tuple(groups(axis) for axis in seen), channels)


def _seen(output: Output, feature: Tensor, axis: int, at_once: int) -> Tensor:
    """Probe which output positions along an axis react to which feature positions.

    One row of a batch for each feature position: a NaN in that slice of the feature.
    """
    reacts = []
    for positions in torch.arange(feature.shape[axis], device=feature.device).split(at_once):
        poisoned = feature.repeat(len(positions), *[1] * (feature.dim() - 1))
        rows = torch.arange(len(positions), device=feature.device)
        poisoned.movedim(axis, 1)[rows, positions] = torch.nan
        hit = output(poisoned).isnan().movedim(axis, 1)
        reacts.append(hit.flatten(2).any(dim=2) if hit.dim() > 2 else hit)
    return torch.cat(reacts).T


def coloured(tap: Tapped, name: str, colours: Colours, norm: float) -> Tensor:
    """Take the norms at a feature with one backward pass per colour, and one to prove them.

    Raises :class:`HiddenWindowsError` if a gradient of any output of any row reaches outside the
    window of that output. What is looked at is this batch, all of it; another batch is proved
    anew. A gradient outside its window is seen if it is larger than 1/100 of what else arrives
    at that position of the feature, and than 1/1000 of the most that arrives anywhere in its row
    (in half precision: than a few units of rounding); smaller ones cannot be told from rounding.
    A single one can hide in a row, with a chance of about 1/50, where two random weights agree.
    """
    if colours.refuted:
        raise HiddenWindowsError(_HIDDEN)

    def backward(start: Tensor) -> Tensor:
        gradients = torch.autograd.grad(
            tap.prediction, tap.edges[name], start, retain_graph=True, allow_unused=True
        )
        gradient = reached(name, gradients)[0]
        return gradient.to(wide(gradient.dtype))

    prediction = tap.prediction
    maps = (prediction.shape[0], colours.channels, *prediction.shape[-len(colours.axes) :])
    start = prediction.new_zeros(maps)
    result = start.new_zeros(maps, dtype=wide(start.dtype))
    weights = rest = None  # random weights of all outputs; what remains of their gradient
    scale = result.new_zeros(())
    if not is_traced():
        weights = torch.rand(maps, generator=colours.generator, dtype=torch.float32).mul_(2).sub_(1)
        weights = (weights + 0.5 * weights.sign()).to(start)  # between 0.5 and 1.5, of either sign
        rest = backward(weights.view(prediction.shape)).clone()
    for channel, chosen in colours.each():
        places = torch.meshgrid(*(group.positions for group in chosen), indexing="ij")
        here: Any = (slice(None), channel, *places)
        start[here] = 1
        gradient = backward(start.view(prediction.shape))
        sizes = _over_channels(gradient, len(chosen), norm)
        result[here] = _window_norms(sizes, chosen, norm)
        if rest is not None and weights is not None:
            # What reaches beyond its window is rebuilt with the weight of another output, or none.
            owners = _of_owners(weights[here], chosen)
            inner = [1] * (gradient.dim() - owners.dim())
            spread = owners.to(gradient.dtype).view(len(owners), *inner, *owners.shape[1:])
            rest.addcmul_(gradient, spread, value=-1)
            scale = scale + _rooted(sizes, norm) * owners.abs()
        start[here] = 0  # not earlier: the gradient of an identity is ``start`` itself
    if rest is not None and not _is_rounding(rest, scale, norm, prediction.dtype):
        colours.refuted = True
        raise HiddenWindowsError(_HIDDEN)
    colours.proved = True
    return result.view(prediction.shape)


def _is_rounding(rest: Tensor, scale: Tensor, norm: float, dtype: torch.dtype) -> bool:
    """Whether what remains of a gradient is rounding, beside the sizes that were added."""
    axes = scale.dim() - 1
    remains = _rooted(_over_channels(rest, axes, norm), norm)
    largest = scale.flatten(1).amax(dim=1).view(-1, *[1] * axes)
    rounding = 16 * torch.finfo(dtype).eps
    allowed = scale * max(1e-2, rounding) + largest * max(1e-3, rounding)
    # A gradient that is NaN is refused elsewhere.
    return not bool((remains > allowed).any())


def _of_owners(weights: Tensor, chosen: Sequence[Group]) -> Tensor:
    """Return, for every feature position, the weight of the output that sees it, or zero."""
    for axis, group in enumerate(chosen, start=1):
        weights = _with_zero(weights, axis).index_select(axis, group.owner)
    return weights


def _with_zero(values: Tensor, axis: int) -> Tensor:
    """Append the extra position that is always zero."""
    return torch.cat([values, torch.zeros_like(values.narrow(axis, 0, 1))], dim=axis)


def _over_channels(gradient: Tensor, axes: int, norm: float) -> Tensor:
    """Put together the channels at every position: (n, *map), of squares for the norm 2."""
    channels = tuple(range(1, gradient.dim() - axes))
    sizes = gradient.square() if norm == 2 else gradient.abs()
    return sizes.amax(dim=channels) if norm == math.inf else sizes.sum(dim=channels)


def _rooted(sizes: Tensor, norm: float) -> Tensor:
    return sizes.sqrt() if norm == 2 else sizes


def _window_norms(sizes: Tensor, chosen: Sequence[Group], norm: float) -> Tensor:
    """Norm of the part of the gradient inside each window of a group."""
    for axis, group in enumerate(chosen, start=1):
        parts = _with_zero(sizes, axis).index_select(axis, group.window.reshape(-1))
        parts = parts.unflatten(axis, tuple(group.window.shape))
        sizes = parts.amax(dim=axis + 1) if norm == math.inf else parts.sum(dim=axis + 1)
    return _rooted(sizes, norm)
