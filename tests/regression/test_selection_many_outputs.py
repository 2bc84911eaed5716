"""Of many outputs the norms of all layers are taken of those rows alone that choose the layer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp
from tests.core import scores_by_group

OUTPUTS, ROWS = 70, 400
X = normal(ROWS, 5, seed=0)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        yield


def wide(between: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), between or nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, OUTPUTS)
    )


def targets(model: nn.Module, feature: str) -> Tensor:
    """Give targets whose noise is as large as the gradient at a feature."""
    prediction, norms = ffcp.gradient_norms(model, X, [feature])
    return prediction + norms[feature] * normal(ROWS, OUTPUTS, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("feature", ["input", "output"])
@pytest.mark.parametrize("batch_size", [None, 130])
def test_scores_are_those_of_rows_that_did_not_wait(feature: str, batch_size: int | None) -> None:
    model, groups = wide(), torch.arange(ROWS) % 2
    y = targets(model, feature)
    loader = [(X[:150], y[:150]), (X[150:], y[150:])]  # whose inputs do not stay
    waited = ffcp.FFCP(model, batch_size=batch_size).calibrate(X, y, groups=groups)
    at_once = ffcp.FFCP(model).calibrate(loader, groups=groups)
    assert waited.feature == at_once.feature == feature
    mine, theirs = scores_by_group(waited), scores_by_group(at_once)
    for group in (0, 1):
        torch.testing.assert_close(mine[group], theirs[group], rtol=1e-4, atol=1e-5)


def test_few_rows_do_without_a_choice() -> None:
    model = wide()
    y = targets(model, "input")
    predictor = ffcp.FFCP(model, selection_alpha=0.1).calibrate(X[:9], y[:9])
    plain = ffcp.CP(model).calibrate(X[:9], y[:9])
    torch.testing.assert_close(predictor.calibration.scores, plain.calibration.scores)


class Root(nn.Module):
    """Its slope at zero is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + 1e-6 * x.abs().sqrt()


@pytest.mark.long
@pytest.mark.parametrize("row", range(200, 206))  # some of which choose, and some wait
def test_a_bad_row_has_its_number_in_all_rows(row: int) -> None:
    model = wide(Root())
    nn.init.zeros_(model[0].bias)
    x, y = X.clone(), targets(model, "0")
    assert ffcp.FFCP(model, ["0"]).calibrate(x, y).feature == "0"
    x[row] = 0
    with pytest.raises(ValueError, match=f"{row}"):
        ffcp.FFCP(model, ["0"]).calibrate(x, y)


def test_candidates_are_compared_at_the_level_of_their_thresholds() -> None:
    model = small_mlp(inputs=5, outputs=2)
    y = targets(wide(), "input")[:, :2]
    union = ffcp.FFCP(model, joint="bonferroni", selection_alpha=0.2, seed=0).calibrate(X, y)
    each = ffcp.FFCP(model, selection_alpha=0.1, seed=0).calibrate(X, y)
    lengths = [
        {name: candidate.mean_length for name, candidate in one.choice.candidates.items()}
        for one in (union, each)
    ]
    assert lengths[0] == lengths[1]
