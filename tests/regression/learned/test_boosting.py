"""Boosted quantiles: trees as tensors give what LightGBM gives, and can be had without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ffcp
from ffcp.regression.learned import boosting
from ffcp.regression.learned.boosting import BoostedQuantiles
from ffcp.regression.learned.nested import at_levels
from tests.conftest import normal, small_mlp


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosting, "_ROUNDS", 20)


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
@pytest.mark.parametrize("name", ["left", "right", "feature"])
@pytest.mark.parametrize("value", [-1, 99])
def test_trees_that_lead_nowhere_are_refused(name: str, value: int) -> None:
    state = {key: tensor.clone() for key, tensor in made().state().items()}
    state[name][0, 0, 0, 0] = value
    with pytest.raises(ValueError, match=name):
        BoostedQuantiles.from_state(state)


@pytest.mark.long
def test_trees_that_lead_in_a_circle_are_refused() -> None:
    state = {key: tensor.clone() for key, tensor in made().state().items()}
    state["left"][0, 0, 0, 1] = 0
    with pytest.raises(ValueError, match="circle"):
        BoostedQuantiles.from_state(state)


@pytest.mark.long
def test_quantiles_are_those_of_lightgbm(monkeypatch: pytest.MonkeyPatch) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    boosters, train = [], lightgbm.train
    monkeypatch.setattr(
        lightgbm, "train", lambda *given: boosters.append(train(*given)) or boosters[-1]
    )
    trees, x = made(outputs=1), normal(200, 3, seed=3)
    expected = torch.stack([torch.from_numpy(b.predict(x.numpy())) for b in boosters], dim=1)
    own = trees(x)[:, 0] / trees.state()["unit"].double()
    torch.testing.assert_close(
        own, at_levels(expected[:, None], boosting._SMALLEST)[:, 0], rtol=1e-12, atol=1e-12
    )


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


@pytest.mark.heavy
def test_auto_tries_both_learners() -> None:
    x = normal(600, 4, seed=0)
    y = x[:, 0] * normal(600, seed=1)
    predictor = ffcp.Auto(small_mlp(), learner="both", selection_fraction=0.5, seed=0)
    predictor.fit(x[:200], y[:200]).calibrate(x[200:], y[200:])
    assert predictor.choice is not None
    names = set(predictor.choice.trials)
    for source in ("training rows", "rows set aside"):
        for which in ("all", "few", "boosted"):
            assert f"Learned, {source}, {which}, central" in names
