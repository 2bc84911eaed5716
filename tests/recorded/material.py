"""Fixed numbers, small float64 models and data for the cases.

All numbers come from one formula in whole-number arithmetic, so they do not depend on the
machine, on a library's random streams, or on what ran before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import ffcp

_shaken = 0.0


@contextmanager
def shaken(size: float) -> Iterator[None]:
    """Move all numbers by this relative size; a result that jumps was a near-tie."""
    global _shaken
    _shaken = size
    try:
        yield
    finally:
        _shaken = 0.0


def _splitmix(count: int, seed: int) -> np.ndarray:
    """Uniform numbers in [0, 1) by splitmix64."""
    z = np.uint64(seed * 2**32) + np.arange(1, count + 1, dtype=np.uint64)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(*shape: int, seed: int) -> Tensor:
    """Numbers in [0, 1)."""
    count = math.prod(shape)
    found = _splitmix(count, seed)
    if _shaken:
        found = found * (1 + _shaken * (2 * _splitmix(count, seed + 100_000) - 1))
    return torch.from_numpy(found).reshape(shape)


def normal(*shape: int, seed: int) -> Tensor:
    """Numbers of mean 0 and variance 1, each from four uniform ones."""
    u = uniform(4, *shape, seed=seed)
    return (u[0] + u[1] + u[2] + u[3] - 2) * math.sqrt(3)


def integers(*shape: int, below: int, seed: int) -> Tensor:
    """Whole numbers from 0."""
    return (uniform(*shape, seed=seed) * below).long()


def fill(model: nn.Module, seed: int, gain: float = 1.7) -> Any:
    """Give a model fixed weights in float64."""
    model = model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            own = 1000 * seed + number
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            values = normal(*parameter.shape, seed=own)
            parameter.copy_(values * gain / math.sqrt(fan_in))
        for number, module in enumerate(model.modules()):
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                size = module.num_features
                module.weight += 1
                module.running_mean.copy_(uniform(size, seed=77_000 + number))
                module.running_var.copy_(0.5 + uniform(size, seed=78_000 + number))
    return model


def said(model: nn.Module, x: Any) -> Tensor:
    """What the model says in eval mode."""
    modes = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        found = model(**x) if isinstance(x, dict) else model(x)
    for module in modes:
        module.training = True
    return found


# -- models ------------------------------------------------------------------------------------


def net(outputs: int = 1, seed: int = 1) -> nn.Sequential:
    """Linear layers at 0, 3 and 5; dropout, so that eval mode matters."""
    layers = nn.Sequential(
        nn.Linear(3, 6),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(6, 5),
        nn.LeakyReLU(0.2),
        nn.Linear(5, outputs),
    )
    return fill(layers, seed)


def quantile_net(targets: int = 1, seed: int = 2) -> nn.Sequential:
    """A lower and an upper quantile of each target, in order for most inputs."""
    model = net(2 * targets, seed)
    with torch.no_grad():
        model[5].bias += torch.tensor([-0.8, 0.8] * targets, dtype=torch.float64)
    if targets > 1:
        model.append(nn.Unflatten(1, (targets, 2)))
    return model


class Nested(nn.Module):
    """A trunk and a head by name; the trunk returns two tensors."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
        self.split = Split()
        self.head = nn.Sequential(nn.Linear(6, 4), nn.SiLU(), nn.Linear(4, outputs))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.split(self.trunk(x))
        return self.head(torch.cat([left.square(), right], dim=1))


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :2], x[:, 2:]


class TwoInputs(nn.Module):
    """Takes two tensors: as positional or as keyword arguments."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(2, 4), nn.Linear(1, 4), nn.Linear(4, outputs)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(left)) * torch.sigmoid(self.b(right)))


class TakesDict(TwoInputs):
    """Takes one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["left"], batch["right"])


def map_net(channels: int = 2, seed: int = 5) -> nn.Sequential:
    """Maps in, maps out: windows of 3 x 3."""
    layers = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, channels, 3, padding=1)
    )
    return fill(layers, seed)


def dead_net() -> nn.Sequential:
    """One hidden ReLU layer that is dead for many inputs."""
    model = fill(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), seed=6)
    with torch.no_grad():
        model[0].bias -= 0.9
    return model


def classifier(classes: int = 8, seed: int = 7) -> nn.Sequential:
    """Logits."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, classes))
    return fill(layers, seed, gain=2.5)


# -- data --------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A model, points to calibrate with, and new points with their targets."""

    model: Any
    x: Tensor
    y: Tensor
    new: Tensor
    new_y: Tensor


def regression(
    targets: int = 1, *, quantiles: bool = False, rows: int = 90, new: int = 5, model: Any = None
) -> Problem:
    """Noise that grows with the first input."""
    if model is None:
        model = quantile_net(targets) if quantiles else net(targets)
    x, noise = normal(rows + new, 3, seed=11), normal(rows + new, targets, seed=12)
    y = said(model, x)
    y = y.mean(dim=-1, keepdim=targets == 1) if quantiles else y
    y = y + (0.2 + x[:, :1].abs()) * noise
    y = y[:, 0] if targets == 1 else y
    return Problem(model, x[:rows], y[:rows], x[rows:], y[rows:])


def steep(targets: int = 1, *, quantiles: bool = False, rows: int = 120) -> Problem:
    """Noise that grows with the gradient at layer 0, and with nothing besides."""
    p = regression(targets, quantiles=quantiles, rows=rows)
    x = torch.cat([p.x, p.new])
    found, norms = ffcp.gradient_norms(p.model, x, ["0"])
    found, size = found.reshape(len(x), targets, -1), norms["0"].reshape(len(x), targets, -1)
    noise = (3 if quantiles else 1) * normal(len(x), targets, seed=41)
    y = found.mean(dim=2) + size.mean(dim=2).square() * noise
    y = y[:, 0] if targets == 1 else y
    return Problem(p.model, p.x, y[:rows], p.new, y[rows:])


def flat(rows: int = 120) -> Problem:
    """Noise that has nothing to do with gradients."""
    p = regression(rows=rows)
    y = said(p.model, torch.cat([p.x, p.new]))[:, 0]
    y = y + 0.5 * normal(len(y), seed=42)
    return Problem(p.model, p.x, y[:rows], p.new, y[rows:])


def maps(rows: int = 40, new: int = 2, channels: int = 2) -> Problem:
    """Maps of 6 x 6 as inputs and targets."""
    model = map_net(channels)
    x = normal(rows + new, 2, 6, 6, seed=15)
    y = said(model, x) + 0.5 * normal(rows + new, channels, 6, 6, seed=16)
    return Problem(model, x[:rows], y[:rows], x[rows:], y[rows:])


def classification(
    classes: int = 8, rows: int = 150, new: int = 20, hotter: float = 1.0
) -> Problem:
    """Labels drawn from the model's own probabilities, at another temperature."""
    model = classifier(classes)
    x = normal(rows + new, 4, seed=21)
    y = drawn(said(model, x) / hotter, seed=22)
    return Problem(model, x[:rows], y[:rows], x[rows:], y[rows:])


def drawn(logits: Tensor, seed: int) -> Tensor:
    """Draw a label from each row of logits, (n, classes, ...)."""
    p = logits.softmax(dim=1)
    u = uniform(len(logits), *logits.shape[2:], seed=seed)
    return (p.cumsum(dim=1) < u[:, None]).sum(dim=1).clamp_max(logits.shape[1] - 1)


def segmentation(classes: int = 4, rows: int = 40, new: int = 2) -> Problem:
    """Images of 5 x 5 with a label for every pixel."""
    model = fill(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, classes, 1)),
        seed=8,
        gain=3.0,
    )
    x = normal(rows + new, 2, 5, 5, seed=25)
    y = drawn(said(model, x), seed=26)
    return Problem(model, x[:rows], y[:rows], x[rows:], y[rows:])


def pieces(x: Any, y: Tensor, size: int) -> list[tuple[Any, Tensor]]:
    """Cut arrays as a loader would."""
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(y), size)]
