"""How an input reaches a model, and what is said where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ffcp.network.cut import call

X = torch.ones(2, 3)


class Pair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("no such rows here")


class Careless(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.shape


class First:
    """What can be called, though Python cannot tell its arguments."""

    __signature__ = "none"

    def __call__(self, given: Any) -> Tensor:
        first: Tensor = given["a"]
        return first


class Unsigned(nn.Module):
    forward = First()  # type: ignore[assignment]


def test_a_tuple_that_forward_cannot_be_spread_over_is_its_one_argument() -> None:
    assert torch.equal(call(Pair(), (X, X), 2), 2 * X)


def test_a_dict_is_handed_over_where_nobody_knows_the_arguments() -> None:
    assert call(Unsigned(), {"a": X, "b": X}, 2) is X


@pytest.mark.parametrize(
    ("model", "x", "error"),
    [(Refusing(), X, AssertionError), (Careless(), {"a": X, "b": X}, AttributeError)],
)
def test_errors_of_the_model_itself_stay_what_they_are(
    model: nn.Module, x: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"rows|shape"):
        call(model, x, 2)
