"""Boosted trees beside the network of a table: what LightGBM learned, and the share they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("pandas")
pytest.importorskip("tabm")
pytest.importorskip("lightgbm")
import lightgbm

from ffcp import tables
from ffcp.regression.learned.nested import KNOTS
from ffcp.tables import training, trees
from ffcp.tables.network import TableNetwork
from ffcp.tables.trees import TargetTrees
from tests.tables.material import houses, quick_fit


def steps(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows whose target jumps, which trees learn at once."""
    x = torch.rand(rows, 3, generator=torch.Generator().manual_seed(seed))
    return x, torch.where((x[:, 0] * 7).floor() % 2 > 0, 1.0, -1.0) * (x[:, 1] > 0.5)


def learned(x: Tensor, y: Tensor, seconds: float = 60.0) -> TargetTrees:
    stop = x[-200:], y[-200:], y[-200:]
    return trees.learn(x[:-200], y[:-200], y[:-200], stop, seconds, seed=0)


def test_tensors_predict_what_lightgbm_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = steps(900)
    y = y + 0.3 * torch.randn(900, generator=torch.Generator().manual_seed(1))
    boosters = []
    train = lightgbm.train

    def record(*given: object, **ways: object) -> lightgbm.Booster:
        boosters.append(train(*given, **ways))
        return boosters[-1]

    monkeypatch.setattr(lightgbm, "train", record)
    mean, quantiles = learned(x, y)(x)
    assert mean.dtype == torch.float64
    np.testing.assert_allclose(mean[:, 0], boosters[0].predict(x.numpy()), rtol=0, atol=1e-12)
    expected = np.sort(np.column_stack([one.predict(x.numpy()) for one in boosters[1:]]), axis=1)
    np.testing.assert_allclose(quantiles, expected, rtol=0, atol=1e-12)
    assert quantiles.shape == (900, len(KNOTS))


def test_time_that_is_over_leaves_trees_all_the_same() -> None:
    x, y = steps(900)
    short, whole = learned(x, y, seconds=1e-6), learned(x, y)
    assert short.sizes[0] < whole.sizes[0] / 4
    assert bool(short(x)[0].isfinite().all())


@pytest.mark.heavy
def test_trees_have_a_share_where_they_are_better_and_none_where_they_are_not() -> None:
    torch.manual_seed(0)
    x, y = steps(900)
    network = TableNetwork.for_rows(x[:700], 3, 1, y[:700])
    network.quantiles.bend.copy_(torch.tensor([0.0, 1.0, 1.0]))
    transformed = network.quantiles.transform(y)
    validation = (x[700:], y[700:], transformed[700:])
    good = trees.learn(x[:700], y[:700], transformed[:700], validation, 60.0, 0)
    network.join(good, x[700:], y[700:])
    assert bool((good.share > 0.7).all())  # the network is untrained
    error = (network(x[700:])[:, 0].detach() - y[700:]).square().mean()
    assert float(error) < 0.1 * float(y[700:].var())
    random = torch.randn(900, generator=torch.Generator().manual_seed(3)) * 50
    bad = learned(x, random)
    fresh = TableNetwork.for_rows(x[:700], 3, 1, y[:700])
    before = fresh.eval()(x)
    fresh.join(bad, x[700:], y[700:])
    assert bool((bad.share <= 0.1).all())
    torch.testing.assert_close(fresh(x), before, rtol=0, atol=1.0)


@pytest.mark.heavy
def test_a_fit_with_trees_is_saved_and_predicts_the_same_without_lightgbm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = quick_fit(houses(900), "price", minutes=0.05)
    assert fitted.networks[0].trees is not None
    folder = fitted.save(tmp_path / "houses.ffcp")
    monkeypatch.setitem(__import__("sys").modules, "lightgbm", None)
    again = tables.load(folder)
    assert torch.equal(again.networks[0].trees.share, fitted.networks[0].trees.share)
    new = houses(50, 5).drop(columns="price")
    one, other = fitted.predict(new), again.predict(new)
    np.testing.assert_array_equal(one["prediction"], other["prediction"])
    np.testing.assert_array_equal(one["lower"], other["lower"])


def test_without_lightgbm_the_network_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    x, y = steps(300)
    network = TableNetwork.for_rows(x, 3, 1, y)
    training.train(network, x, y, x[:50], y[:50], seconds=60, seed=0, most_epochs=1)
    assert network.trees is None
    assert network.shape.trees == ()


@pytest.mark.parametrize("name", ["feature", "booster"])
def test_trees_that_cannot_be_are_refused(name: str) -> None:
    x, y = steps(900)
    made = learned(x, y)
    getattr(made, f"trees_{name}").fill_(10**6)
    with pytest.raises(ValueError, match=name):
        made.check()
