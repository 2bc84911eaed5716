"""Localized thresholds: exact weighted quantiles."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ffcp import conformal_rank
from ffcp.calibrations import Local
from ffcp.conformal import kernel_weights, local
from ffcp.conformal.kernel_weights import ONE, whole
from ffcp.conformal.kernels import as_kernel
from ffcp.conformal.random_numbers import Draws
from ffcp.kernels import Localizer
from tests.conftest import normal
from tests.core import filled, threshold

LONG = pytest.mark.heavy


def calibrated(
    scores: Tensor, embedding: Tensor, kernel: str, bandwidth: float, guarantee: str
) -> Local:
    """Make a localized calibration of these points."""
    near = Local(Localizer(kernel, bandwidth=bandwidth), guarantee)
    return filled(near, scores, {"embedding": embedding})


def reference(scores: list[float], kernel_weights: list[Fraction], alpha: Fraction) -> float:
    """The localized quantile by its definition; the point itself weighs 1, at infinity."""
    total = sum(kernel_weights) + 1
    running = Fraction(0)
    for score, weight in sorted(zip(scores, kernel_weights, strict=True)):
        running += weight
        if running >= (1 - alpha) * total:
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


def recalibrated(scores: list[float], table: list[list[Fraction]], alpha: Fraction) -> float:
    """Where the recalibrated band ends, by its definition: every score is tried.

    ``table`` has the weights of all points around all points, the new one last.
    """
    n = len(scores)
    k = conformal_rank(n, alpha)
    ends = sorted({-math.inf, *scores, math.inf})
    for low, high in itertools.pairwise(ends):
        every = [*scores, (low, high)]  # the new score lies between the two

        def is_smaller(one: Any, other: Any) -> bool:
            if isinstance(one, tuple):
                return bool(other >= one[1]) if not isinstance(other, tuple) else False
            return bool(one <= other[0]) if isinstance(other, tuple) else bool(one < other)

        shares = [
            sum((w for w, s in zip(row, every, strict=True) if is_smaller(s, mine)), Fraction(0))
            / sum(row)
            for row, mine in zip(table, every, strict=True)
        ]
        if sum(share < shares[-1] for share in shares[:-1]) >= k:
            return low
    return math.inf


# Whole numbers, so that distances come out exactly and ties are real.
places = st.integers(-6, 6).map(float)
values = st.one_of(st.integers(0, 4).map(float), st.just(math.inf))


@pytest.mark.long
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
    thresholds = threshold(near, alpha, {"embedding": torch.tensor(asked)[:, None]})
    expected = []
    for x in asked:
        every = [*where, x]
        table = [exact_weights(kernel, bandwidth, one, every) for one in every]
        expected.append(
            reference(scores, table[-1][:-1], alpha)
            if guarantee == "none"
            else recalibrated(scores, table, alpha)
        )
    assert thresholds[:, 0].tolist() == expected


@pytest.mark.long
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
    thresholds = threshold(near, alpha, {"embedding": x})
    exact = [float(v) for v in torch.tensor(asked)]
    expected = [
        reference(scores, exact_weights("nearest", k, x, where), alpha) for x in exact
    ]  # fmt: skip
    assert thresholds[:, 0].tolist() == expected


@pytest.mark.long
@pytest.mark.parametrize("width", [pytest.param(1, marks=LONG), 3, pytest.param(12, marks=LONG)])
@pytest.mark.parametrize("k", [pytest.param(1, marks=LONG), 6, pytest.param(30, marks=LONG)])
def test_the_level_of_nearest_neighbours_equals_its_definition(k: int, width: int) -> None:
    n, alpha = 30, Fraction(1, 5)
    scores, where = normal(n, 1, seed=3).double(), normal(n, width, seed=4)
    x = torch.cat([normal(4, width, seed=5), 2.5 * normal(4, width, seed=6)])
    near = calibrated(scores, where, "nearest", k, "level")
    found = threshold(near, alpha, {"embedding": x})
    for row, level in enumerate(found[:, 0].tolist()):
        every = torch.cat([where, x[row : row + 1]]).double()
        distance = torch.cdist(every, every).fill_diagonal_(-1)
        near = distance.argsort(dim=1).argsort(dim=1) <= k  # itself, and k of all others
        table = [[Fraction(int(w)) for w in some] for some in near.tolist()]
        assert level == recalibrated(scores[:, 0].tolist(), table, alpha)


@pytest.mark.heavy
@given(
    scores=st.lists(st.integers(0, 9).map(float), min_size=3, max_size=30),
    k=st.integers(1, 30),
    x=st.integers(-1, 7),
    seed=st.integers(0, 10**6),
    width=st.sampled_from([1, 7]),
)
def test_ties_of_nearest_neighbours_never_shorten_a_band(
    scores: list[float], k: int, x: int, seed: int, width: int
) -> None:
    # However the new point's ties with others are broken, the band is at least as long.
    n, k = len(scores), min(k, len(scores))
    where = torch.randint(0, 6, (n,), generator=torch.Generator().manual_seed(seed)).float()
    near = calibrated(
        torch.tensor(scores)[:, None], where[:, None].expand(-1, width), "nearest", k, "level"
    )
    asked = torch.full((1, width), float(x))
    found = float(threshold(near, 0.3, {"embedding": asked}))

    def nearest(place: float) -> list[int]:
        return sorted(range(n), key=lambda j: (abs(float(where[j]) - place), j))

    wins = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5
    table = []
    for i in range(n):
        others = [j for j in nearest(float(where[i]))[: k + 1] if j != i][: min(k, n - 1)]
        edge = max((abs(float(where[j] - where[i])) for j in others), default=0.0)
        distance = abs(x - float(where[i]))
        if k == n or distance < edge or (distance == edge and wins[i]):
            if k < n:
                last = [j for j in others if abs(float(where[j] - where[i])) == edge]
                others.remove(last[seed % len(last)])
            others.append(n)
        table.append([Fraction(int(j == i or j in others)) for j in range(n + 1)])
    mine = nearest(float(x))[:k]
    table.append([Fraction(int(j == n or j in mine)) for j in range(n + 1)])
    assert found >= recalibrated(scores, table, Fraction(3, 10))


def test_points_that_set_the_level_may_be_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forty of eighty: the shares are taken around them only, among all points.
    monkeypatch.setattr(local, "LEVEL_ROWS", 40)
    scores, where, x = normal(80, 1, seed=0), normal(80, 1, seed=1), normal(15, 1, seed=2)
    found = threshold(calibrated(scores, where, "box", 0.5, "level"), 0.1, {"embedding": x})
    picked = np.random.default_rng(0).permutation(80)[:40].tolist()
    k, ends = conformal_rank(40, 0.1), [-math.inf, *scores[:, 0].sort().values.tolist(), math.inf]
    for row, level in enumerate(found[:, 0].tolist()):
        every = torch.cat([where, x[row : row + 1]])[:, 0]
        near = (every[:, None] - every).abs() <= 0.5
        for low, high in itertools.pairwise(ends):
            score = torch.cat(
                [scores[:, 0], torch.tensor([max(low, min(high, low / 2 + high / 2))])]
            )
            share = (near & (score < score[:, None])).sum(dim=1).double() / near.sum(dim=1)
            if (share[picked] < share[-1]).sum() >= k:
                assert level == low
                break
        else:
            assert level == math.inf


@pytest.mark.long
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("guarantee", ["none", "level", "random"])
def test_blocks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, guarantee: str, outputs: int
) -> None:
    scores, where, x = normal(700, outputs, seed=5), normal(700, 3, seed=6), normal(90, 3, seed=7)

    def thresholds() -> Tensor:
        near = calibrated(scores, where, "gaussian", 1.0, guarantee)
        return threshold(near, 0.1, {"embedding": x, "row": torch.arange(90)}, Draws(0, 3))

    at_once = thresholds()
    for module, name in ((local, "_BLOCK"), (kernel_weights, "_CACHE"), (kernel_weights, "_ROWS")):
        monkeypatch.setattr(module, name, 100)
    monkeypatch.setattr(local, "_COLUMNS", (7, 11))
    assert torch.equal(thresholds(), at_once)


def test_every_output_has_its_own_local_quantile() -> None:
    scores, where, x = normal(200, 2, seed=1), normal(200, 2, seed=2), normal(20, 2, seed=3)
    for kernel, bandwidth in (("box", 1.0), ("nearest", 30)):
        for guarantee in ("none", "level"):
            both, *apart = (
                threshold(
                    calibrated(some, where, kernel, bandwidth, guarantee), 0.2, {"embedding": x}
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
        assert torch.equal(threshold(near, 0.5, {"embedding": where}), scores.double())


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
def test_random_localization_weighs_the_point_itself_like_the_others(kernel: str) -> None:
    scores, where, x = normal(80, 1, seed=1).double(), normal(80, 2, seed=2), normal(30, 2, seed=3)
    near = calibrated(scores, where, kernel, 1.5, "random")
    draws, rows, chosen = Draws(5, 3), torch.arange(30), as_kernel(kernel)
    thresholds = threshold(near, 0.2, {"embedding": x, "row": rows}, draws)
    centre = x + 1.5 * draws.by(chosen.steps, rows, 2)
    for row in range(30):
        squared = (torch.cat([where, x[row : row + 1]]) - centre[row]).square().sum(dim=1)
        weight = as_kernel(kernel).log_weight(squared / 1.5**2).exp()
        order = scores[:, 0].argsort()
        reached = weight[:-1][order].cumsum(0) >= 0.8 * weight.sum()
        expected = float(scores[order][reached][0]) if reached.any() else math.inf
        assert float(thresholds[row]) == expected
