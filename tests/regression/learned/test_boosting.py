"""Boosted quantiles: trees as tensors give what LightGBM gives, and can be had without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ffcp
from ffcp.regression.learned import boosting
from ffcp.regression.learned.boosting import BoostedQuantiles
from ffcp.regression.learned.nested import at_levels, to_levels
from tests.conftest import normal


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosting, "_MOST_ROUNDS", 20)
    monkeypatch.setattr(boosting, "_PATIENCE", 10)


def made(outputs: int = 2) -> BoostedQuantiles:
    x = normal(400, 3, seed=1)
    noise = (1 + x[:, :1].abs()) * normal(400, outputs, seed=2)
    noise[::7, 0] = torch.nan
    return boosting.learn(x, noise)


@pytest.mark.long
def test_quantiles_never_cross_and_are_the_same_in_any_batch() -> None:
    trees, x = made(), normal(700, 3, seed=3)  # more rows than go down at once
    quantiles = trees(x)
    assert quantiles.shape == (700, 2, 41)
    assert bool((quantiles.diff(dim=-1) > 0).all())
    torch.testing.assert_close(torch.cat([trees(x[:1]), trees(x[1:])]), quantiles)


@pytest.mark.long
def test_trees_are_made_again_from_their_tensors() -> None:
    trees, x = made(), normal(30, 3, seed=3)
    again = BoostedQuantiles.from_state(trees.state())
    assert torch.equal(again(x), trees(x))
    assert again.outputs == 2


@pytest.mark.long
def test_states_that_cannot_have_been_saved_are_refused() -> None:
    state = made().state()
    for name, value, culprit in (
        ("knots", state["knots"].flip(0), "knots"),
        ("unit", -state["unit"], "unit"),
        ("knots", state["knots"][:-1], "boosters"),
    ):
        with pytest.raises(ValueError, match=culprit):
            BoostedQuantiles.from_state({**state, name: value})


@pytest.mark.long
def test_quantiles_at_the_knots_are_those_of_lightgbm(monkeypatch: pytest.MonkeyPatch) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    boosters, train = [], lightgbm.train

    def noted(*given: Any, **more: Any) -> Any:
        boosters.append(train(*given, **more))
        return boosters[-1]

    monkeypatch.setattr(lightgbm, "train", noted)
    trees, x = made(outputs=1), normal(200, 3, seed=3)
    predicted = [torch.from_numpy(one.predict(x.numpy())) for one in boosters[-5:]]
    knots, unit = trees.state()["knots"], trees.state()["unit"].double()
    expected = at_levels(torch.stack(predicted, dim=1)[:, None], 1e-6, to_levels(knots))
    torch.testing.assert_close(trees(x), expected * unit, rtol=1e-12, atol=1e-12)


def test_rows_held_out_end_the_boosting_and_there_are_some_trees_anyway() -> None:
    x, noise = normal(400, 2, seed=1), normal(400, 1, seed=2)
    held = (normal(100, 2, seed=3), normal(100, 1, seed=4))
    rounds = boosting.learn(x, noise, held=held).rounds
    assert len(rounds) == 5
    assert min(rounds) == 10  # nothing can be learned here
    assert boosting.learn(x, noise, rounds=[3, 4, 5, 6, 7]).rounds == [3, 4, 5, 6, 7]


def test_columns_after_the_first_are_not_looked_at() -> None:
    x = normal(300, 4, seed=1)
    trees = boosting.learn(x, x[:, 3:] * normal(300, 1, seed=2), first=2)
    other = torch.cat([x[:, :2], torch.zeros(300, 2)], dim=1)
    assert torch.equal(trees(x), trees(other))


_WITHOUT = """
import sys
sys.modules["lightgbm"] = None
import torch, ffcp
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
model.load_state_dict(torch.load(sys.argv[2], weights_only=True))
band = ffcp.load(sys.argv[1], model).predict_interval(torch.ones(2, 4))
assert band.lower.isfinite().all()
try:
    ffcp.Learned(model, learner="boosting").fit(torch.randn(90, 4), torch.randn(90))
except ImportError as error:
    assert "ffcp[trees]" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.heavy
def test_saved_trees_need_no_lightgbm(tmp_path: Path) -> None:
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x = normal(300, 4, seed=0)
    predictor = ffcp.Learned(model, learner="boosting").calibrate(x, normal(300, seed=1))
    predictor.save(tmp_path / "trees.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    files = [str(tmp_path / name) for name in ("trees.safetensors", "model.pt")]
    subprocess.run([sys.executable, "-c", _WITHOUT, *files], check=True)


@pytest.mark.parametrize("known", [0, 1, 2, 5])
def test_an_output_of_which_few_residuals_are_known_is_learned(known: int) -> None:
    residuals = normal(60, 2, seed=2)
    residuals[known:, 1] = torch.nan
    trees = boosting.learn(normal(60, 3, seed=1), residuals)
    assert bool(trees(normal(5, 3, seed=3)).isfinite().all())


def test_trees_do_not_split_rows_by_rounding_errors_of_the_model() -> None:
    """A row by itself has others than in a batch, and would get the interval of another leaf."""

    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 + 1e-6 * x[:, 0] * torch.ones((), requires_grad=True)

    x = torch.arange(800.0)[:, None] % 4
    predictor = ffcp.Learned(Same(), learner="boosting", on="prediction", calibrate_rows=300)
    predictor.calibrate(x, 3 + 100 * x[:, 0] * normal(800, seed=1))
    interval = predictor.predict_interval(x[:4])
    torch.testing.assert_close(
        interval.upper - interval.prediction, interval.upper[:1] - 3 + 0 * x[:4, 0]
    )
