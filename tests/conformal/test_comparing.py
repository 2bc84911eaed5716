"""The nearest of all points: the very ones that a full sort of exact distances gives."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from ffcp.conformal import comparing
from ffcp.conformal.comparing import EveryPoint, among, smallest
from tests.conftest import normal


@pytest.fixture(autouse=True)
def few_points_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_FEW", 0)


@pytest.fixture(params=["products", "faiss"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for neighbours in either way, whatever the number of dimensions."""
    if request.param == "faiss":
        pytest.importorskip("faiss")
    monkeypatch.setattr(comparing, "_WIDE", 0 if request.param == "faiss" else 10**9)


def sorted_out(points: Tensor, x: Tensor, k: int) -> Tensor:
    """Give the nearest by distances in float64, rounded to float32; of equal ones the first."""
    rows = []
    for one in x.double():
        squared = (points.double() - one).square().sum(dim=1).float()
        rows.append(squared.argsort(stable=True)[:k].sort().values)
    return torch.stack(rows)


def clusters(n: int, width: int, seed: int, size: float) -> Tensor:
    """Points around two far ends, where products in float32 lose digits."""
    points = size * normal(n, width, seed=seed)
    points[::2] += 1
    return points


DATA = {
    "normal": normal(2050, 24, seed=1),
    "two dimensions": normal(2050, 2, seed=2),
    "off centre": normal(2050, 24, seed=3) + 1000,
    "whole numbers": (2 * normal(2050, 6, seed=4)).round(),
    "copies": normal(205, 24, seed=5).repeat(10, 1),
    "one place": torch.full((2050, 5), 3.3),
    "clusters": clusters(2050, 8, 6, 0.005),
    "tiny clusters": clusters(2050, 8, 7, 1e-5),
    "one far away": torch.cat([normal(2049, 5, seed=8), torch.full((1, 5), 1e9)]),
    "large": 3e14 * normal(2050, 24, seed=9),
    "larger": 1e18 * normal(2050, 24, seed=10),
    "small": 1e-15 * normal(2050, 24, seed=11),
    "smaller": 3e-22 * normal(2050, 24, seed=12),
    "many copies": torch.cat(
        [normal(20, 5, seed=13)[normal(2000, seed=16).argsort() % 20], normal(50, 5, seed=14)]
    ),
}


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("k", [1, 40, 700, 1999, 2000])
def test_the_nearest_are_those_of_a_full_sort(name: str, k: int) -> None:
    points, x = DATA[name][:2000], DATA[name][2000:]
    search, expected = EveryPoint(points, k), sorted_out(points, x, k)
    assert torch.equal(search.rows(x, k), expected)
    assert torch.equal(search(x, k)[0], expected)
    assert torch.equal(torch.cat([search.rows(one, k) for one in x.split(1)]), expected)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("k", [1, 30, 60])
def test_of_copies_of_the_new_point_those_count_that_do_with_distances(k: int) -> None:
    # Their distances are the rounding of products, which is not the same for all copies.
    points = normal(50, 5, seed=15).repeat(40, 1)
    x = points[:50]
    search = EveryPoint(points, 60)
    assert search._is_rough_enough
    assert torch.equal(search.rows(x, k), search(x, k)[0])


def test_where_float32_is_too_coarse_for_some_distances_these_are_taken_again() -> None:
    points, x = DATA["clusters"][:2000], DATA["clusters"][2000:]
    search, expected = EveryPoint(points, 40), sorted_out(points, x, 40)
    distances = search._near._rough.from_each(search._places.moved(x)).numpy()
    assert not np.array_equal(smallest(distances, 40), expected.numpy())
    rows, is_decided = search._by_rough(x, 40)
    assert is_decided.mean() > 0.9
    assert np.array_equal(rows[is_decided], expected.numpy()[is_decided])


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(
    ("name", "is_enough"),
    [
        ("normal", True),
        ("off centre", True),
        ("copies", True),
        ("many copies", False),
        ("one place", False),
        ("tiny clusters", False),
    ],
)
def test_points_say_whether_float32_is_enough(name: str, is_enough: bool) -> None:
    assert EveryPoint(DATA[name], 150)._is_rough_enough == is_enough


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("far", [1e16, 3e18, 1e25])
@pytest.mark.parametrize("k", [40, 2049, 2050])
def test_new_points_near_the_end_of_float32_have_the_nearest_too(
    monkeypatch: pytest.MonkeyPatch, far: float, k: int
) -> None:
    # Beyond it squared distances are infinite, and all points equally far.
    monkeypatch.setattr(comparing, "_AGREEING", 0)  # or it would be noticed by chance
    points, x = DATA["large"], far * normal(40, 24, seed=14)
    search = EveryPoint(points, k)
    assert search._is_rough_enough
    assert torch.equal(search.rows(x, k), sorted_out(points, x, k))


@pytest.mark.usefixtures("_way")
def test_points_near_the_other_end_of_float32_are_not_compared_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "_AGREEING", 0)
    points, x = DATA["smaller"][:2000], DATA["smaller"][2000:]
    search = EveryPoint(points, 40)
    assert not search._by_rough(x, 40)[1].any()


def test_products_of_fewer_digits_than_float32_has_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As torch.set_float32_matmul_precision("medium") makes them, on some processors.
    points, x = DATA["normal"][:2000], DATA["normal"][2000:]
    search, expected = EveryPoint(points, 40), sorted_out(points, x, 40)
    monkeypatch.setattr(
        search._near._rough, "_points", search._near._rough._points.bfloat16().float()
    )
    assert torch.equal(search.rows(x, 40), expected)
    assert torch.equal(torch.cat([search.rows(one, 40) for one in x.split(1)]), expected)


@pytest.mark.parametrize("far", [1e9, 1e12, 1e18, 9.97e36])
@pytest.mark.parametrize(("rows", "width"), [(100, 10), (2000, 10), (2000, 100)])
def test_one_point_that_is_far_away_changes_no_neighbours_of_others(
    far: float, rows: int, width: int
) -> None:
    points = normal(rows, width, seed=7)
    expected = sorted_out(points[:-1], points[:50], 20)
    for changed in (slice(1), slice(None)):  # a coordinate, or all of them
        moved = points.clone()
        moved[-1, changed] = far
        search = EveryPoint(moved, 20)
        assert torch.equal(search.rows(moved[:50], 20), expected)
        assert torch.equal(search(moved[:50], 20)[0], expected)


def test_copies_of_one_point_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.full((300, 10), 3.0)
    search = EveryPoint(points, 5)
    monkeypatch.setattr(comparing, "_in_full", lambda *_: lambda *_: pytest.fail("in full"))
    for x in (points[:20], points[:20] + 1):
        assert torch.equal(search(x, 5)[0], torch.arange(5).expand(20, 5))


def test_points_far_away_have_the_nearest_of_those_beside_them() -> None:
    scales = 10.0 ** torch.arange(2, 12, dtype=torch.float64).repeat_interleave(30)
    far = scales[:, None] * (1 + 1e-4 * normal(300, 10, seed=8).double())
    points = torch.cat([normal(700, 10, seed=9).double(), far])
    search = EveryPoint(points, 5)
    assert torch.equal(search.rows(points, 5), sorted_out(points, points, 5))
    assert torch.equal(search(points[700:], 1)[0][:, 0], torch.arange(700, 1000))


@pytest.mark.usefixtures("_way")
def test_autocast_changes_no_neighbours() -> None:
    points, x = DATA["normal"][:2000], DATA["normal"][2000:]
    search = EveryPoint(points, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows, is_decided = search._by_rough(x, 40)
    assert is_decided.all()
    assert np.array_equal(rows, sorted_out(points, x, 40).numpy())


@pytest.mark.parametrize("k", [1, 40, 300, 1900, 2000])
def test_guessing_a_bound_gives_the_very_numbers_of_a_full_sort(k: int) -> None:
    # Whole numbers: many are equal, at the edge too. In the last rows those that are looked at for
    # the bound are the smallest, so that it lets too few through.
    numbers = (normal(30, 2000, seed=3) * 40).abs().round().numpy()
    numbers[-5:] += 100
    numbers[-5:, :: comparing._EVERY] = 1
    expected = np.sort(np.argsort(numbers, axis=1, kind="stable")[:, :k], axis=1)
    assert np.array_equal(smallest(numbers, k), expected)
    is_known = among(numbers, k).first()[1]
    assert is_known[:-5].all()
    assert is_known[-5:].all() == (k in (1, 40, 1900, 2000))


def test_numbers_beyond_the_bound_may_be_among_those_in_doubt() -> None:
    numbers = np.arange(20.0)[None]
    near = among(numbers, 4, bound=np.array([[5.0]]))
    assert near.first(2.0, lambda row, column: numbers[row, column])[1].all()
    assert not near.first(2.5, lambda row, column: numbers[row, column])[1].any()


@pytest.mark.parametrize("k", [1, 40, 200])
def test_the_bound_lets_enough_through_in_whatever_order_points_come(k: int) -> None:
    # Where few are wanted it is no guess: ascending, descending, and with the period of a group.
    line = np.arange(10_000.0)
    numbers = np.stack([line, line[::-1], line % 625, line // 16, (line * 7919) % 10_007])
    is_below = numbers <= comparing._bound(numbers, k)
    assert (is_below.sum(axis=1) >= k).all()
    assert is_below[[0, 1, 3, 4]].mean() < 0.1


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (7, 129), (16, 64)])
def test_true_places_are_those_of_numpy(shape: tuple[int, int], share: float) -> None:
    mask = np.random.default_rng(0).random(shape) < share
    assert np.array_equal(comparing._true_places(mask), np.flatnonzero(mask))


# --- faiss ----------------------------------------------------------------------------------------


def wide(n: int, seed: int) -> Tensor:
    return normal(n, comparing._WIDE, seed=seed)


def test_faiss_is_used_with_many_dimensions_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("faiss")
    points, x = wide(500, 1), wide(20, 2)
    found = EveryPoint(points, 30)
    assert isinstance(found._near, comparing.Faiss)
    assert isinstance(EveryPoint(points[:, 1:], 30)._near, comparing.Products)
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    other = EveryPoint(points, 30)
    assert isinstance(other._near, comparing.Products)
    assert torch.equal(found.rows(x, 30), other.rows(x, 30))
    assert torch.equal(found.rows(x, 30), sorted_out(points, x, 30))


def test_numbers_of_faiss_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    points, x = wide(500, 1), wide(20, 2)
    search = EveryPoint(points, 30)

    class Wrong:
        ntotal = 500

        def search(self, x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
            values, columns = index.search(x, count)
            return values * np.float32(1.01), (columns + 1) % 500

    assert isinstance(search._near, comparing.Faiss)
    index = search._near._index
    assert search._by_rough(x, 30)[1].all()
    monkeypatch.setattr(search._near, "_index", Wrong())
    assert torch.equal(search.rows(x, 30), sorted_out(points, x, 30))


def test_a_search_by_faiss_can_be_copied_and_shared_by_threads() -> None:
    pytest.importorskip("faiss")
    points, x = wide(500, 1), wide(64, 2)
    search, expected = copy.deepcopy(EveryPoint(points, 30)), sorted_out(points, x, 30)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: search.rows(one, 30), x.split(2)))
    assert torch.equal(torch.cat(found), expected)
