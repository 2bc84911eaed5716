"""Laws of conditional calibration: coverage for every f of the class, and under its shifts.

Over many independent calibration sets, the mean of f(x) (covered - (1 - alpha)) must not be below 0
for any non-negative f that is linear in constant and features, and be 0 if randomised. A correct
program is rejected at ERROR_RATE, shared by all f. That CP fails on the same draws shows that the
tests can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.calibrations import Conditional
from tests.law import ERROR_RATE

ALPHA, ROWS, ASKED, REPEATS = 0.2, 120, 40, 300
pytestmark = pytest.mark.heavy


class Zero(nn.Module):
    """Predicts 0; its layer has four bounded activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        weight = torch.cat([4 * torch.eye(3), torch.tensor([[2.0, 2.0, -2.0]])])
        self.layer[0].weight.data, self.layer[0].bias.data = weight, -weight.sum(dim=1) / 2

    def forward(self, x: Tensor) -> Tensor:
        return 0 * self.layer(x)[:, 0]


def features(x: Tensor) -> Tensor:
    """Two groups that overlap, and a number."""
    return torch.stack([x[:, 0] > 0.6, x[:, 1] > 0.3, x[:, 2]], dim=1).double()


def noise(x: Tensor) -> Tensor:
    return 0.1 + 3 * (x[:, 0] > 0.6) * (x[:, 1] <= 0.3) + x[:, 1] + 2 * x[:, 2] ** 2


def functions() -> dict[str, Callable[[Tensor], Tensor]]:
    """Non-negative functions of the class: groups, their complements, slopes, and sums of them."""
    random = np.random.default_rng(0)
    weights = [*np.eye(7), *random.exponential(size=(6, 7))]

    def f(x: Tensor, weight: np.ndarray) -> Tensor:
        columns = features(x)
        pieces = torch.cat([torch.ones(len(x), 1), columns, 1 - columns], dim=1)
        return pieces @ torch.from_numpy(weight)

    return {str(w.round(1)): lambda x, w=w: f(x, w) for w in weights}  # type: ignore[misc]


def draw(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, 3, generator=generator)
    return x, noise(x) * torch.randn(rows, generator=generator)


def misses(
    predictor: Any, one_by_one: bool = False, shift: Callable[[Tensor], Tensor] | None = None
) -> dict[str, np.ndarray]:
    """Return for every f, and every calibration set, the mean of f (covered - (1 - alpha))."""
    generator, found = torch.Generator().manual_seed(0), []
    classes = functions() if shift is None else {"all": lambda x: torch.ones(len(x))}
    for _ in range(REPEATS):
        predictor.calibrate(*draw(generator, ROWS))
        x, y = draw(generator, ASKED * (1 if shift is None else 4) // (4 if one_by_one else 1))
        if shift is not None:  # keep rows with a probability in proportion to the density ratio
            ratio = shift(x)
            kept = torch.rand(len(x), generator=generator) < ratio / ratio.max()
            x, y = x[kept], y[kept]
        parts = x.split(1) if one_by_one else [x]
        upper = torch.cat([predictor.predict_interval(part, ALPHA).upper for part in parts])
        gain = (y.abs() <= upper).double() - (1 - ALPHA)
        found.append([float((f(x) * gain).mean()) for f in classes.values()])
    return dict(zip(classes, np.array(found).T, strict=True))


def z_scores(found: dict[str, np.ndarray]) -> np.ndarray:
    return np.array([v.mean() / (v.std(ddof=1) / np.sqrt(len(v))) for v in found.values()])


def limit(found: dict[str, np.ndarray], sides: int = 1) -> float:
    return float(stats.norm.ppf(1 - ERROR_RATE / len(found) / sides))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_every_function_of_the_class_is_covered(one_by_one: bool) -> None:
    predictor = ffcp.CP(Zero(), calibration=Conditional(features))
    found = misses(predictor, one_by_one)
    assert (z_scores(found) > -limit(found)).all()
    # Never more than (features + 1) / (rows + 1) above, in units of the largest f.
    mean = found[next(iter(found))]  # f = 1
    assert mean.mean() < 4 / (ROWS + 1) + 4 * mean.std() / np.sqrt(REPEATS)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_randomised_thresholds_cover_exactly(one_by_one: bool) -> None:
    predictor = ffcp.CP(Zero(), calibration=Conditional(features, randomized=True), seed=0)
    found = misses(predictor, one_by_one)
    assert (np.abs(z_scores(found)) < limit(found, sides=2)).all()


def test_cp_fails_in_groups_and_is_refused_by_the_same_test() -> None:
    found = misses(ffcp.CP(Zero()))
    assert (z_scores(found) < -limit(found)).any()


def few(x: Tensor) -> Tensor:
    """A shift to large values of the number, outside of the second group."""
    return features(x) @ torch.tensor([0.5, -1.0, 3.0]).double() + 1


def test_shifted_inputs_are_covered() -> None:
    found = misses(ffcp.CP(Zero(), calibration=Conditional(features)), shift=few)
    assert (z_scores(found) > -limit(found)).all()
    plain = misses(ffcp.CP(Zero()), shift=few)
    assert (z_scores(plain) < -limit(plain)).all()


def test_activations_of_a_layer_are_covered_under_their_shifts() -> None:
    model = Zero()

    def shift(x: Tensor) -> Tensor:
        with torch.no_grad():  # |activations| < 1: never negative
            return 4 + model.layer(x) @ torch.tensor([1.0, 0.0, 3.0, 0.0])

    predictor = ffcp.CP(model, calibration=Conditional("layer"))
    generator = torch.Generator().manual_seed(1)
    predictor.fit(*draw(generator, 1000))  # four directions: all linear functions of the layer
    found = misses(predictor, shift=shift)
    assert predictor.calibration.directions.shape == (4, 4)
    assert (z_scores(found) > -limit(found)).all()
    plain = misses(ffcp.CP(model), shift=shift)
    assert (z_scores(plain) < -limit(plain)).all()
