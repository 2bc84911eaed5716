"""Inputs and heads at the edge of what is taken."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.network import inputs
from ffcp.network.jacobian.chained import chained
from ffcp.network.stored import Stored
from tests.conftest import normal


class TwoParts(NamedTuple):
    left: Tensor
    right: Any


def test_lists_of_a_dict_are_read_where_they_hold_numbers_for_every_row() -> None:
    given = {
        "x": torch.zeros(3, 2),
        "age": [1, 2, 3],
        "names": ["a", "b", "c"],
        "ragged": [[1], [2, 3], [4]],
        "parts": [torch.zeros(3), torch.zeros(3), torch.zeros(3)],
        "short": [1, 2],
    }
    read = inputs._with_lists_read(given)
    assert read["age"].tolist() == [1, 2, 3]
    assert all(read[name] is given[name] for name in ("names", "ragged", "parts", "short"))


def test_what_has_no_rows_is_refused() -> None:
    with pytest.raises(TypeError, match="dict"):
        inputs.row_count({"name": "a"})
    with pytest.raises(ValueError, match="rows"):
        inputs.row_count([torch.zeros(3), torch.tensor(1.0)])


def test_parts_of_a_named_tuple_are_exchanged_and_the_rest_stays() -> None:
    given = TwoParts(torch.zeros(2), "as it is")
    changed = inputs.replace(given, {"input[0]": torch.ones(2)})
    assert isinstance(changed, TwoParts)
    assert changed.left.equal(torch.ones(2))
    assert changed.right == "as it is"


def test_a_narrow_first_layer_changes_no_norm() -> None:
    layers = [nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 9)]
    feature = normal(5, 8, seed=1)
    rows = torch.func.vmap(torch.func.jacrev(nn.Sequential(*layers)))(feature)
    assert chained(feature, layers, 2).allclose(rows.norm(dim=2), rtol=1e-5)


class Forgotten(torch.autograd.Function):
    """A function of the old kind, through which torch pushes no tangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Forgotten.apply(x)


def test_a_head_that_takes_no_tangent_cannot_be_sketched() -> None:
    model = nn.Sequential(nn.Linear(2, 3), Doubled(), nn.Linear(3, 4))
    x, y = normal(10, 2, seed=1), normal(10, 4, seed=2)
    assert ffcp.FFCP(model, "0", method="exact").score(x, y).isfinite().all()
    with pytest.raises(ValueError, match="'0'"):
        ffcp.FFCP(model, "0", method=ffcp.scales.Sketch(4)).score(x, y)


def test_of_what_is_made_of_stored_predictions_nothing_is_taken_for_granted() -> None:
    class Shifted(Stored):
        def forward(self, prediction: Tensor, **known: Any) -> Tensor:
            return prediction - prediction.mean()  # rows mix

    with pytest.raises(ValueError, match="row"):
        ffcp.CP(Shifted()).calibrate(normal(50, seed=1), normal(50, seed=2))


def test_stored_predictions_with_a_forward_of_their_own_are_run() -> None:
    x, y = normal(50, seed=1), normal(50, seed=2)
    model = Stored()
    model.forward = lambda prediction: prediction + 1  # type: ignore[method-assign]
    expected = ffcp.CP(Stored()).calibrate(x + 1, y).predict_interval(x + 1)
    assert torch.equal(ffcp.CP(model).calibrate(x, y).predict_interval(x).lower, expected.lower)


def test_stored_predictions_show_themselves_to_hooks_on_all_modules() -> None:
    x, y = normal(50, seed=1), normal(50, seed=2)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda _, x, value: value + 1)
    try:
        band = ffcp.CP(Stored()).calibrate(x, y).predict_interval(x)
    finally:
        handle.remove()
    expected = ffcp.CP(Stored()).calibrate(x + 1, y).predict_interval(x + 1)
    assert torch.equal(band.lower, expected.lower)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_stored_predictions_that_are_no_numbers_are_refused_by_row(bad: float) -> None:
    x, y = normal(50, seed=1), normal(50, seed=2)
    predictor = ffcp.CP(Stored()).calibrate(x, y)
    x[7] = bad
    with pytest.raises(ValueError, match=f"{bad}.*row 7 "):
        ffcp.CP(Stored()).calibrate(x, y)
    with pytest.raises(ValueError, match=f"{bad}.*row 7 "):
        predictor.predict_interval(x)
