"""Automatic choices in predictors of bands: who chooses, who calibrates, and what is said of it."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp import conformal_rank
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE, draw_hits
from tests.regression.test_layer_selection import Known
from tests.rows import counted_rows

X, Y, NEW = normal(200, 4, seed=0), normal(200, seed=1), normal(50, 4, seed=2)


def quietly(predictor, *data, **options):
    """Calibrate, whatever is said of the choice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        return predictor.calibrate(*data, **options)


# -- few rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [9, 10, 11])
def test_rows_that_are_all_needed_calibrate_plain_cp(rows: int, mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp)
    with pytest.warns(ffcp.FFCPWarning, match=rf"\b{rows} rows"):
        predictor.calibrate(X[:rows], Y[:rows])
    assert predictor.feature == "output"
    assert predictor.choice is None
    assert len(predictor.calibration) == rows
    band = predictor.predict_interval(NEW, alpha=0.1)
    assert band.upper.isfinite().all()
    plain = ffcp.CP(mlp).calibrate(X[:rows], Y[:rows]).predict_interval(NEW, alpha=0.1)
    torch.testing.assert_close(band, plain)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rows", [9, 10, 11, 12, 13, 14])
def test_the_choice_never_makes_the_band_infinite(rows: int, seed: int, mlp: nn.Module) -> None:
    predictor = quietly(ffcp.FFCP(mlp, seed=seed), X[:rows], Y[:rows])
    assert predictor.predict_interval(NEW, alpha=0.1).upper.isfinite().all()


def test_an_infinite_band_says_how_many_rows_chose(mlp: nn.Module) -> None:
    predictor = quietly(ffcp.FFCP(mlp), X[:14], Y[:14])
    chose, left = predictor.choice.rows, len(predictor.calibration)
    assert (chose, left) == (3, 11)
    with pytest.warns(ffcp.FFCPWarning, match=rf"\b{left}\b.*\b{chose}\b"):
        predictor.predict_interval(NEW, alpha=0.05)


def test_an_infinite_band_of_two_choices_names_both(mlp: nn.Module) -> None:
    localizer = ffcp.kernels.Localizer("box", on="input")
    predictor = quietly(ffcp.FFLCP(mlp, "auto", localizer), X[:40], Y[:40])
    with pytest.warns(ffcp.FFCPWarning, match=r"\b8\b"):
        predictor.predict_interval(100 + NEW)


def test_a_given_feature_leaves_all_rows_to_calibrate(mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp, "0").calibrate(X[:12], Y[:12])
    with pytest.warns(ffcp.FFCPWarning, match=r"\b12\b"):
        predictor.predict_interval(NEW, alpha=0.05)


def test_too_few_rows_for_the_level_of_the_choice_are_divided_still() -> None:
    near = ffcp.LCP(small_mlp(), "nearest", selection_alpha=0.01).calibrate(X[:100], Y[:100])
    assert near.bandwidth == 80
    assert near.predict_interval(NEW, alpha=0.1).upper.isfinite().all()


# -- what is said ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_best_layer_that_is_named_is_not_plain_cp_by_another_name(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 1)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ffcp.FFCPWarning)
        ffcp.FFCP(model, seed=seed).calibrate(X, Y)
    for warning in caught:
        named = re.search("'(.*?)'", str(warning.message))
        assert named is not None
        _, norms = ffcp.gradient_norms(model, X, [named[1]])
        assert norms[named[1]].std() > 1e-4 * norms[named[1]].mean()


def test_a_model_whose_gradients_are_all_constant_is_told_so() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    with pytest.warns(ffcp.FFCPWarning, match="feature"):
        ffcp.FFCP(model).calibrate(X, Y)


# -- many outputs ------------------------------------------------------------------------------


def test_too_many_outputs_are_refused_before_any_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 12_288))

    def never(*args: object) -> None:
        raise AssertionError("a gradient was taken")

    monkeypatch.setattr("torch.autograd.grad", never)
    refused = pytest.raises(ValueError, match=r"\b12288\b")
    with counted_rows(model) as count, refused:
        ffcp.FFCP(model, feature="auto").calibrate(X, torch.zeros(200, 12_288))
    assert 1 <= count.rows <= 2


@pytest.mark.long
def test_fewer_rows_choose_where_outputs_are_many() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 700))
    x, y = normal(8000, 1, seed=0), normal(8000, 700, seed=1)
    for batch_size in (None, 37):
        predictor = quietly(ffcp.FFCP(model, ["0"], batch_size=batch_size), x, y)
        assert predictor.choice.rows == 10**6 // 700 < 8000 // 5


# -- missing targets ---------------------------------------------------------------------------


def with_holes(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=generator)
    y = torch.randn(rows, 3, generator=generator) * (0.1 + x[:, 1:2].abs())
    return x, y.masked_fill(torch.rand(rows, 3, generator=generator) < 0.3, math.nan)


@pytest.mark.parametrize("joint", [False, True, 0.6, "bonferroni"])
def test_the_layer_is_chosen_from_targets_with_holes(joint) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = with_holes(generator, 300)
    predictor = quietly(ffcp.FFCP(small_mlp(outputs=3), missing=True, joint=joint), x, y)
    assert predictor.choice.rows == 60
    lengths = [candidate.mean_length for candidate in predictor.choice.candidates.values()]
    assert all(map(math.isfinite, lengths))
    assert predictor.predict_interval(x).upper.isfinite().all()


def test_an_output_whose_targets_are_all_missing_does_not_decide() -> None:
    x = torch.randn(1000, 1)
    y = torch.randn(1000, 2) * x.exp()
    y[:, 1] = math.nan

    class Twice(Known):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, None].expand(-1, 2)

    predictor = ffcp.FFCP(Twice(), ["part"], missing=True).calibrate(x, y)
    assert predictor.feature == "part"


@pytest.mark.heavy
def test_each_output_covers_as_promised_when_the_layer_is_chosen_from_holes() -> None:
    model, excess = small_mlp(outputs=3), []

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = quietly(ffcp.FFCP(model, missing=True), x_cal, y_cal)
        band = predictor.predict_interval(x, alpha=0.2)
        points = (~predictor.calibration.scores.isnan()).sum(dim=0)
        promised = torch.tensor([conformal_rank(n, 0.2) / (n + 1) for n in points.tolist()])
        inside = (band.lower <= y) & (y <= band.upper)
        hits = inside.double().sum(dim=0) - promised * (~y.isnan()).sum(dim=0)
        excess.append(hits.numpy())
        return inside

    draw_hits(with_holes, covered, n=40, t=30, repeats=200)
    # The promise holds exactly: the mean excess over it is 0 up to chance.
    z = np.mean(excess, axis=0) / (np.std(excess, axis=0) / math.sqrt(len(excess)))
    assert np.abs(z).max() < stats.norm.isf(ERROR_RATE / 6)
