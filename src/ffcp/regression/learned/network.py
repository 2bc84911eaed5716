"""A learner: small networks for many quantiles of the residual, which cannot cross."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ffcp.regression.learned.nested import LEVELS

MEMBERS, WIDTH = 4, 64  # number of networks, whose quantiles are averaged, and their width
_RATE, _DECAY, _DROPOUT = 4e-3, 1e-3, 0.05
_LEAST_BATCH, _BATCH = 64, 512  # a tenth of the rows, but no fewer and no more
_EPOCHS, _PATIENCE = 150, 16
_STEPS, _FULL = 600, 0.4  # at most so many steps, this share of them at the full rate
_HELD_OUT = 6  # each network holds out another sixth of the rows, for early stopping
_SMALLEST = 1e-6  # step between two quantiles, in units of a typical residual
# The same, where learning starts: a smaller one hardly learns to grow, a larger one to shrink.
_FIRST_STEP, _LAST_STEP = 1e-3, 3.0
_FLOAT = torch.finfo(torch.float32)
_CLIP = 6.0  # standardised columns are clipped here


class QuantileNetwork:
    """Quantiles of the residual from columns of numbers; made by :func:`learn`."""

    kind = "network"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._t = dict(tensors)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors, for :meth:`from_state`."""
        return dict(self._t)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> QuantileNetwork:
        """Return the learner from saved tensors; raise ValueError for impossible ones."""
        columns, outputs = len(tensors["centre"]), len(tensors["unit"])
        shapes = {
            **dict.fromkeys(("centre", "spread", "mean", "deviation"), (columns,)),
            "unit": (outputs,),
            **_shapes(columns, outputs),
        }
        checked = checked_tensors(tensors, {n: (torch.float32, s) for n, s in shapes.items()})
        for name in ("spread", "deviation", "unit"):
            if not bool((checked[name] > 0).all()):
                raise ValueError(f"{name!r} of what was learned must be positive")
        return cls(checked)

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self._t["unit"])

    def __call__(self, columns: Tensor) -> Tensor:
        """Return quantiles (n, outputs, levels), in float64, from the columns that were learned."""
        t = self._t
        first = columns[:, : len(t["centre"])]
        scaled = standardised(first.to("cpu", torch.float32), t)
        with torch.no_grad():
            raw = _forward(scaled.expand(MEMBERS, -1, -1), t)
            quantiles = ascending(raw.unflatten(-1, (len(t["unit"]), -1))).mean(dim=0)
        return quantiles.double() * t["unit"].double()[:, None]


def checked_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.dtype, Sequence[int]]]
) -> dict[str, Tensor]:
    """Return tensors on the CPU; raise ValueError for other names, types, shapes or infinity."""
    if set(tensors) != set(expected):
        raise ValueError(
            f"expected the tensors {', '.join(sorted(expected))}, got {', '.join(sorted(tensors))}"
        )
    for name, (dtype, shape) in expected.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{name!r} of what was learned must be {dtype} of shape {tuple(shape)}, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name!r} of what was learned must be finite")
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _shapes(columns: int, outputs: int) -> dict[str, tuple[int, ...]]:
    last = outputs * len(LEVELS)
    return {
        "w1": (MEMBERS, columns, WIDTH),
        "b1": (MEMBERS, 1, WIDTH),
        "w2": (MEMBERS, WIDTH, WIDTH),
        "b2": (MEMBERS, 1, WIDTH),
        "w3": (MEMBERS, WIDTH, last),
        "b3": (MEMBERS, 1, last),
    }


def standardised(columns: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    """Return standardised columns, with long tails compressed by a logarithm."""
    compressed = _compressed(columns, scales["centre"], scales["spread"])
    return ((compressed - scales["mean"]) / scales["deviation"]).clamp(-_CLIP, _CLIP)


def _compressed(columns: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    distance = (columns - centre) / spread
    return distance.sign() * distance.abs().log1p()


def _scales(columns: Tensor) -> dict[str, Tensor]:
    """Return what :func:`standardised` needs of every column."""
    columns = columns.double()
    centre = columns.median(dim=0).values
    spread = (columns - centre).abs().mean(dim=0)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    compressed = _compressed(columns, centre, spread)
    mean, deviation = compressed.mean(dim=0), compressed.std(dim=0, correction=0)
    deviation = torch.where(deviation > 1e-9, deviation, torch.ones_like(deviation))
    scales = {"centre": centre, "spread": spread, "mean": mean, "deviation": deviation}
    return {name: tensor.float() for name, tensor in scales.items()}


def ascending(raw: Tensor) -> Tensor:
    """Return quantiles from unconstrained numbers (..., levels): a median, and steps from it.

    >>> bool((ascending(torch.randn(3, len(LEVELS))).diff() > 0).all())
    True
    """
    middle, half = raw[..., :1], raw.shape[-1] // 2
    steps = functional.softplus(raw[..., 1:]) + _SMALLEST
    below = steps[..., :half].flip(-1).cumsum(dim=-1).flip(-1)
    above = steps[..., half:].cumsum(dim=-1)
    return torch.cat([middle - below, middle, middle + above], dim=-1)


def unordered(quantiles: Tensor) -> Tensor:
    """Invert :func:`ascending` for quantiles (outputs, levels), side by side.

    Steps too small or too large to learn from are clipped.

    >>> quantiles = torch.linspace(-1, 1, len(LEVELS))[None]
    >>> torch.allclose(ascending(unordered(quantiles)), quantiles, atol=1e-4)
    True
    """
    steps = quantiles.double().diff().clamp(_FIRST_STEP, _LAST_STEP)
    raw = steps + (-(-steps).expm1()).log()  # the inverse of softplus
    middle = quantiles.shape[-1] // 2
    return torch.cat([quantiles[:, middle, None], raw], dim=-1).flatten().float()


def _forward(
    z: Tensor, t: Mapping[str, Tensor], generator: torch.Generator | None = None
) -> Tensor:
    """Run all networks, (members, n, columns), with dropout if random numbers are given."""
    for layer in "12":
        z = functional.silu(torch.baddbmm(t[f"b{layer}"], z, t[f"w{layer}"]))
        if generator is not None:
            # One mask for all networks: drawing it is slow.
            draws = torch.rand(z.shape[1:], generator=generator, dtype=torch.float32)
            z = z * (draws >= _DROPOUT) / (1 - _DROPOUT)
    return torch.baddbmm(t["b3"], z, t["w3"])


def learn(
    columns: Tensor, residuals: Tensor, seed: int = 0, weights: Tensor | None = None
) -> QuantileNetwork:
    """Learn quantiles of residuals (n, outputs) from columns (n, k), the same for the same seed.

    NaN residuals are ignored; ``weights`` (n,) are those of the rows.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(2000, 1)
    >>> network = learn(x, (1 + 9 * x) * torch.randn(2000, 1))
    >>> narrow, wide = network(torch.tensor([[0.0], [1.0]]))[:, 0].diff(dim=1).sum(dim=1)
    >>> bool(wide > 3 * narrow)
    True
    """
    with torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(seed % 2**63)
        scales = _scales(columns)
        unit = typical_size(residuals)
        z = standardised(columns.float(), scales)
        targets = (residuals.double() / unit.double()).clamp(_FLOAT.min, _FLOAT.max).float()
        shares = torch.ones(len(z)) if weights is None else weights
        trained = _train(z, targets, shares.float(), generator)
    return QuantileNetwork({**scales, "unit": unit, **trained})


def typical_size(residuals: Tensor) -> Tensor:
    """Return the median size of each output's residuals; 1 where that is zero."""
    unit = residuals.double().abs().nanmedian(dim=0).values
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    # Residuals of a model in float64 can be smaller or larger than any number in float32.
    return unit.clamp(_FLOAT.tiny, _FLOAT.max).float()


def _train(z: Tensor, y: Tensor, shares: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    marginal = torch.nanquantile(y.double(), LEVELS, dim=0).T.nan_to_num()
    known, y = shares[:, None] * ~y.isnan(), y.nan_to_num()
    weights = {
        name: torch.rand(shape, generator=generator, dtype=torch.float32)
        for name, shape in _shapes(z.shape[1], y.shape[1]).items()
    }
    for tensor in weights.values():
        # As torch initialises its linear layers; w3 and b3 have the same number of inputs.
        bound = 1 / math.sqrt(tensor.shape[1] if tensor.shape[1] > 1 else WIDTH)
        tensor.mul_(2).sub_(1).mul_(bound).requires_grad_()
    with torch.no_grad():
        # Training starts from the quantiles of all residuals: the right result where columns
        # contain no information.
        weights["w3"].zero_()
        weights["b3"].copy_(unordered(marginal))
    levels = LEVELS.float()
    # Each network holds out other rows, and learns from the rest.
    batch = min(max(_LEAST_BATCH, len(z) // 10), _BATCH)
    size, order = max(1, len(z) // _HELD_OUT), torch.randperm(len(z), generator=generator)
    turned = torch.stack([order.roll(-member * size) for member in range(MEMBERS)])
    held, rest = turned[:, :size], turned[:, size:] if len(z) > size else turned

    def loss(rows: Tensor, random: torch.Generator | None = None) -> Tensor:
        raw = _forward(z[rows], weights, random).unflatten(-1, (y.shape[1], -1))
        error = y[rows][..., None] - ascending(raw)
        each = (error * (levels - (error < 0).float())).mean(dim=-1)  # pinball loss
        return (each * known[rows]).mean(dim=(1, 2))

    optimizer = torch.optim.AdamW(weights.values(), _RATE, weight_decay=_DECAY, fused=True)
    with torch.no_grad():
        best = loss(held)
    state = {name: tensor.detach().clone() for name, tensor in weights.items()}
    waited, steps = torch.zeros(MEMBERS, dtype=torch.float32), 0
    for _ in range(_EPOCHS):
        shuffled = [own[torch.randperm(len(own), generator=generator)] for own in rest]
        for rows in torch.stack(shuffled).split(batch, dim=1):
            # With a rate that falls to zero, 600 steps do as well as 1,600 at one rate.
            share = max(0.02, min(1.0, (1 - steps / _STEPS) / (1 - _FULL)))
            optimizer.param_groups[0]["lr"] = _RATE * share
            optimizer.zero_grad()
            loss(rows, generator).sum().backward()
            optimizer.step()
            steps += 1
        with torch.no_grad():
            now = loss(held)
            better = now < best * (1 - 1e-4)
            best, waited = torch.where(better, now, best), torch.where(better, 0, waited + 1)
            for name, tensor in weights.items():
                state[name][better] = tensor[better]
        if bool((waited > _PATIENCE).all()) or steps >= _STEPS:
            break
    return state
