"""A model whose predictor is an attribute of its own, as in a LightningModule."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp

X, Y = normal(120, 4, seed=0), normal(120, seed=1)


class Owner(nn.Module):
    def __init__(self, make: Callable[[nn.Module], Any], *, is_first: bool = False) -> None:
        super().__init__()
        if is_first:  # in the order in which torch goes through parts
            self.predictor = nn.Identity()
        self.body = small_mlp()
        self.predictor = make(self)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def with_ffcp(model: nn.Module) -> Any:
    return ffcp.FFCP(model, "body.0")


MAKERS = {"CP": ffcp.CP, "FFCP": with_ffcp, "picked": lambda m: ffcp.CP(m, output=lambda out: out)}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("first", ["eval", "to", "repr", "state_dict", "load", "predictor.eval"])
def test_a_model_can_have_its_own_predictor(name: str, first: str) -> None:
    owner = Owner(MAKERS[name])
    uses: dict[str, Callable[[], Any]] = {
        "eval": lambda: owner.eval(),
        "to": lambda: owner.to(torch.float64).to(torch.float32),
        "repr": lambda: (repr(owner), repr(owner.predictor)),
        "state_dict": lambda: owner.state_dict(),
        "load": lambda: owner.load_state_dict(Owner(MAKERS[name]).state_dict()),
        "predictor.eval": lambda: owner.predictor.eval(),
    }
    uses[first]()  # each of them may be the first to meet the circle
    owner.train()
    owner.predictor.calibrate(X, Y)
    expected = MAKERS[name](owner).calibrate(X, Y).predict_interval(X).upper
    for use in uses.values():
        if use is not uses["load"]:
            use()
    assert torch.equal(owner.predictor.predict_interval(X).upper, expected)
    assert not owner.predictor.training  # it goes along with its owner
    assert len(list(owner.parameters())) == len(list(owner.body.parameters()))


@pytest.mark.parametrize("is_first", [False, True])
def test_the_owner_saves_and_loads_the_calibration(is_first: bool, tmp_path: Path) -> None:
    owner = Owner(ffcp.CP, is_first=is_first)
    expected = owner.predictor.calibrate(X, Y).predict_interval(X).upper
    torch.save(owner.state_dict(), tmp_path / "checkpoint")
    other = Owner(ffcp.CP, is_first=is_first)
    with torch.no_grad():
        other.body[0].weight.zero_()
    other.load_state_dict(torch.load(tmp_path / "checkpoint"))
    assert torch.equal(other.predictor.predict_interval(X).upper, expected)
    with torch.no_grad():
        other.body[0].weight.zero_()
    with pytest.raises(RuntimeError, match="weights"):
        other.predictor.predict_interval(X)


def test_copies_and_files_of_a_predictor_that_is_a_part_of_its_model(tmp_path: Path) -> None:
    owner = Owner(ffcp.CP)
    expected = owner.predictor.calibrate(X, Y).predict_interval(X).upper
    for copied in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert copied.predictor.model is copied
        assert torch.equal(copied.predictor.predict_interval(X).upper, expected)
    owner.predictor.save(tmp_path / "saved")
    assert torch.equal(ffcp.load(tmp_path / "saved", owner).predict_interval(X).upper, expected)
    assert torch.equal(ffcp.load(tmp_path / "saved", Owner(ffcp.CP))(X).upper, expected)


def test_layers_are_chosen_in_a_model_that_has_its_own_predictor() -> None:
    owner = Owner(lambda model: ffcp.Auto(model, seed=0))
    band = owner.predictor.calibrate(X, Y).predict_interval(X)
    owner.eval()
    assert bool((band.lower <= band.upper).all())


def test_an_unknown_feature_of_a_model_without_parts_is_named() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1]

    with pytest.raises(ValueError, match="encoder"):
        ffcp.FFCP(Plain(), "encoder")
