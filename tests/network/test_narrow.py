"""Norms taken from the side of a feature that is narrower than the output."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.network.cut import Cut
from ffcp.network.jacobian import chained, dispatch
from ffcp.network.jacobian.dispatch import exact
from tests.conftest import normal

X = normal(7, 5, seed=0)


def wide(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 8), *between, nn.Linear(8, 90)
    ).eval()


class Added(nn.Module):
    """A head that is no chain of layers: a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 90)

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x)
        return self.last(value + torch.tanh(value))


MODELS = {
    "relu": lambda: wide(nn.ReLU()),
    "in place": lambda: wide(nn.ReLU(inplace=True), nn.Dropout(0.5)),
    "tanh, nested": lambda: nn.Sequential(wide(nn.Tanh()), nn.GELU()),
    "linear": lambda: wide(),
    "skip": Added,
}


def by_rows(model: nn.Module, x: Tensor, name: str, norm: float) -> Tensor:
    with Cut(model, [name]) as cut:
        return exact(cut(x), norm)[name]


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("kind", ["relu", "in place", "tanh, nested"])
def test_products_without_dead_units_are_those_of_the_rows(
    kind: str, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chained, "_NUMBERS", 2 * 5 * 90)  # two rows at once, and one alone
    model = MODELS[kind]()
    x = X.clone()
    x[3] = -100.0 * X.abs().max()  # where whole layers may be dead
    inner = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)][:-1]
    for name in ("input", *inner):
        _, norms = ffcp.gradient_norms(model, x, [name], norm, method="exact")
        torch.testing.assert_close(norms[name], by_rows(model, x, name, norm))


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("kind", MODELS)
def test_norms_of_narrow_features_are_those_of_the_rows(kind: str, norm: float) -> None:
    model = MODELS[kind]()
    inner = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)][:-1]
    for name in ("input", *inner):
        for method in ("exact", "auto"):
            _, norms = ffcp.gradient_norms(model, X, [name], norm, method=method)
            torch.testing.assert_close(norms[name], by_rows(model, X, name, norm))


def test_a_dead_row_has_norms_of_zero() -> None:
    model = wide(nn.ReLU())
    nn.init.constant_(model[0].bias, -1e3)
    for norm in (1, 2, math.inf):
        _, norms = ffcp.gradient_norms(model, X, ["0"], norm)
        assert torch.equal(norms["0"], torch.zeros(7, 90))


def test_narrow_features_take_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> dict[str, Tensor]:
        raise AssertionError("rows were taken one by one")

    monkeypatch.setattr(dispatch, "exact", refuse)
    for model in (wide(nn.ReLU()), Added()):
        ffcp.gradient_norms(model, X, ["0" if isinstance(model, nn.Sequential) else "first"])


def test_a_layer_with_a_hook_is_no_known_layer() -> None:
    model = wide(nn.ReLU())
    model[2].register_forward_hook(lambda module, args, output: 2 * output)
    with Cut(model, ["0"]) as cut:
        tap = cut(X)
    assert chained.chain(model, "0", tap) is None
    _, norms = ffcp.gradient_norms(model, X, ["0"])
    torch.testing.assert_close(norms["0"], by_rows(model, X, "0", 2))


def test_many_rows_are_the_same_as_few() -> None:
    model, x = wide(nn.ReLU()), normal(4000, 5, seed=1)
    _, norms = ffcp.gradient_norms(model, x, ["0"])
    _, few = ffcp.gradient_norms(model, x[:10], ["0"])
    torch.testing.assert_close(norms["0"][:10], few["0"])


def test_several_narrow_features_at_once_are_the_same_as_each() -> None:
    model = wide(nn.ReLU())
    _, norms = ffcp.gradient_norms(model, X, ["input", "0", "2", "4"])
    for name, values in norms.items():
        torch.testing.assert_close(values, by_rows(model, X, str(name), 2))


def test_perturbed_features_are_not_taken_for_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 90))
    nn.init.constant_(model[0].bias, -20.0)  # dead everywhere, but for large steps
    _, norms = ffcp.gradient_norms(model, X, ["0"], method=ffcp.scales.Smooth(20.0, 8))
    assert bool((norms["0"] > 0).all())
