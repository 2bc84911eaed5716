"""Localized thresholds: exact weighted quantiles."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ffcp.conformal import local, weights
from ffcp.conformal.draws import Draws
from ffcp.conformal.kernels import as_kernel
from ffcp.conformal.local import Local, Localizer
from ffcp.conformal.rank import conformal_rank
from ffcp.conformal.weights import ONE, whole
from tests.conftest import normal


def calibrated(
    scores: Tensor, embedding: Tensor, kernel: str, bandwidth: float, guarantee: str
) -> Local:
    """Make a localized calibration of these points."""
    near = Local(Localizer(kernel, bandwidth=bandwidth), guarantee)
    near.add(scores, {"embedding": embedding})
    return near


def reference(
    scores: list[float], weights: list[Fraction], alpha: Fraction, level: Fraction | None = None
) -> float:
    """The localized quantile by its definition; the point itself weighs 1, at infinity."""
    total = sum(weights) + 1
    running = Fraction(0)
    for score, weight in sorted(zip(scores, weights, strict=True)):
        running += weight
        # Plain: reaches the share 1 - alpha. Recalibrated: exceeds the level.
        if (running >= (1 - alpha) * total) if level is None else (running > level * total):
            return score
    return math.inf


def exact_weights(kernel: str, bandwidth: float, x: float, points: list[float]) -> list[Fraction]:
    """Weights as the library rounds them: to multiples of 2**-23."""
    if kernel == "nearest":
        order = sorted(range(len(points)), key=lambda i: (abs(points[i] - x), i))
        near = set(order[: int(bandwidth)])
        return [Fraction(int(i in near)) for i in range(len(points))]
    squared = torch.tensor([[((p - x) / bandwidth) ** 2 for p in points]])
    rounded = whole(as_kernel(kernel).log_weight(squared))[0]
    return [Fraction(int(w), ONE) for w in rounded]


def reference_level(
    scores: list[float], weights: list[list[Fraction]], alpha: Fraction
) -> Fraction | None:
    """The k-th smallest of (a_i + 1) / (b_i + 1)."""
    bounds = sorted(
        (sum((w for w, s in zip(row, scores, strict=True) if s < score), Fraction(0)) + 1)
        / (sum(row) + 1)
        for score, row in zip(scores, weights, strict=True)
    )
    k = conformal_rank(len(scores), alpha)
    return bounds[k - 1] if k <= len(scores) else None


# Whole numbers, so that distances come out exactly and ties are real.
places = st.integers(-6, 6).map(float)
values = st.one_of(st.integers(0, 4).map(float), st.just(math.inf))


@given(
    points=st.lists(st.tuples(values, places), min_size=1, max_size=40),
    asked=st.lists(places, min_size=1, max_size=4),
    kernel=st.sampled_from(["gaussian", "laplace", "box"]),
    bandwidth=st.sampled_from([0.05, 1.0, 3.0, 100.0]),
    alpha=st.sampled_from([Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(7, 10)]),
    guarantee=st.sampled_from(["none", "level"]),
)
def test_thresholds_equal_brute_force(
    points: list[tuple[float, float]],
    asked: list[float],
    kernel: str,
    bandwidth: float,
    alpha: Fraction,
    guarantee: str,
) -> None:
    scores, where = (list(column) for column in zip(*points, strict=True))
    near = calibrated(
        torch.tensor(scores)[:, None], torch.tensor(where)[:, None], kernel, bandwidth, guarantee
    )
    thresholds = near.threshold(alpha, {"embedding": torch.tensor(asked)[:, None]})
    level = None
    if guarantee == "level":
        rows = [exact_weights(kernel, bandwidth, x, where) for x in where]
        level = reference_level(scores, rows, alpha) or Fraction(2)
    expected = [
        reference(scores, exact_weights(kernel, bandwidth, x, where), alpha, level) for x in asked
    ]
    assert thresholds[:, 0].tolist() == expected


@given(
    scores=st.lists(values, min_size=3, max_size=30),
    k=st.integers(1, 30),
    asked=st.lists(st.floats(-10, 40), min_size=1, max_size=4),
    alpha=st.sampled_from([Fraction(1, 10), Fraction(1, 4), Fraction(1, 2)]),
    line=st.booleans(),
)
def test_nearest_neighbours_equal_brute_force(
    scores: list[float], k: int, asked: list[float], alpha: Fraction, line: bool
) -> None:
    k = min(k, len(scores))
    where = [i + 0.01 * i * i for i in range(len(scores))]  # no two distances alike
    width = 1 if line else 12
    embedding = torch.tensor(where)[:, None].expand(-1, width)
    near = calibrated(torch.tensor(scores)[:, None], embedding, "nearest", k, "none")
    x = torch.tensor(asked)[:, None].expand(-1, width)
    thresholds = near.threshold(alpha, {"embedding": x})
    exact = [float(v) for v in torch.tensor(asked)]
    expected = [
        reference(scores, exact_weights("nearest", k, x, where), alpha) for x in exact
    ]  # fmt: skip
    assert thresholds[:, 0].tolist() == expected


def test_the_level_of_nearest_neighbours_equals_its_definition() -> None:
    scores, where = normal(60, 1, seed=3).double(), normal(60, 2, seed=4)
    k = 12
    near = calibrated(scores, where, "nearest", k, "level")
    level = near._level(near._weights(k), 0)
    bounds = []
    for i in range(60):
        distance = (where - where[i]).norm(dim=1)
        distance[i] = -1
        others = distance.argsort()[1:k]  # k - 1 of them, not itself
        bounds.append((int((scores[others] < scores[i]).sum()) + 1) / (k + 1))
    assert (level.numerators / level.denominators).tolist() == pytest.approx(sorted(bounds))


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("guarantee", ["none", "level", "random"])
def test_blocks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, guarantee: str, outputs: int
) -> None:
    scores, where, x = normal(700, outputs, seed=5), normal(700, 3, seed=6), normal(90, 3, seed=7)

    def thresholds() -> Tensor:
        near = calibrated(scores, where, "gaussian", 1.0, guarantee)
        return near.threshold(0.1, {"embedding": x, "row": torch.arange(90)}, Draws(0, 3))

    at_once = thresholds()
    for module, name in ((local, "_BLOCK"), (weights, "_CACHE"), (weights, "_ROWS")):
        monkeypatch.setattr(module, name, 100)
    monkeypatch.setattr(local, "_COLUMNS", (7, 11))
    assert torch.equal(thresholds(), at_once)


def test_every_output_has_its_own_local_quantile() -> None:
    scores, where, x = normal(200, 2, seed=1), normal(200, 2, seed=2), normal(20, 2, seed=3)
    for kernel, bandwidth in (("box", 1.0), ("nearest", 30)):
        for guarantee in ("none", "level"):
            both, *apart = (
                calibrated(some, where, kernel, bandwidth, guarantee).threshold(
                    0.2, {"embedding": x}
                )
                for some in (scores, scores[:, :1], scores[:, 1:])
            )
            assert torch.equal(both, torch.cat(apart, dim=1))


def test_far_away_data_keeps_its_small_distances() -> None:
    # |a|^2 + |b|^2 - 2ab in single precision would lose them beside 1e6.
    together = 1e6 + torch.arange(8.0)[:, None]
    spread = torch.cat([together, torch.tensor([[-1e6]])])
    for where in (together, spread):
        scores = torch.arange(float(len(where)))[:, None]
        near = calibrated(scores, where, "box", 0.5, "none")
        assert torch.equal(near.threshold(0.5, {"embedding": where}), scores.double())


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
def test_random_localization_weighs_the_point_itself_like_the_others(kernel: str) -> None:
    scores, where, x = normal(80, 1, seed=1).double(), normal(80, 2, seed=2), normal(30, 2, seed=3)
    near = calibrated(scores, where, kernel, 1.5, "random")
    draws, rows, chosen = Draws(5, 3), torch.arange(30), as_kernel(kernel)
    thresholds = near.threshold(0.2, {"embedding": x, "row": rows}, draws)
    centre = x + 1.5 * chosen.steps(draws.uniform(rows, 2 * chosen.draws), 2)
    for row in range(30):
        squared = (torch.cat([where, x[row : row + 1]]) - centre[row]).square().sum(dim=1)
        weight = as_kernel(kernel).log_weight(squared / 1.5**2).exp()
        order = scores[:, 0].argsort()
        reached = weight[:-1][order].cumsum(0) >= 0.8 * weight.sum()
        expected = float(scores[order][reached][0]) if reached.any() else math.inf
        assert float(thresholds[row]) == expected


@pytest.mark.parametrize("guarantee", ["none", "level"])
def test_what_was_worked_out_is_forgotten_when_points_are_added(guarantee: str) -> None:
    scores, where, x = normal(200, 1, seed=0), normal(200, 2, seed=1), normal(5, 2, seed=2)
    at_once = calibrated(scores, where, "gaussian", 1.0, guarantee)
    grown = calibrated(scores[:100], where[:100], "gaussian", 1.0, guarantee)
    grown.threshold(0.1, {"embedding": x})  # works out what holds for these points only
    grown.add(scores[100:], {"embedding": where[100:]})
    expected = at_once.threshold(0.1, {"embedding": x})
    assert torch.equal(grown.threshold(0.1, {"embedding": x}), expected)


def test_advice_on_other_bandwidths_keeps_nothing() -> None:
    near = calibrated(normal(200, 1, seed=0), normal(200, 2, seed=1), "gaussian", 0.1, "level")
    x = {"embedding": normal(5, 2, seed=2)}
    near.threshold(0.1, x)
    kept = set(near._cache)
    assert "about" in near.why_infinite(0.1, x)
    assert set(near._cache) == kept
