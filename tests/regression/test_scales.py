"""Scales: the named ones, functions, and a choice among several."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ffcp
from tests.conftest import normal, small_mlp
from tests.core import config
from tests.regression.test_layer_selection import Known, informed

X, Y, NEW = normal(200, 4, seed=0), normal(200, seed=1), normal(50, 4, seed=2)


def knowing(seen: ffcp.BatchOutput) -> Tensor:
    """Say how large the noise of ``informed`` data is."""
    return seen.x[:, 0].exp()


def guessing(seen: ffcp.BatchOutput) -> Tensor:
    return 1 + seen.x[:, 0].sin().square()


def wrong(seen: ffcp.BatchOutput) -> Tensor:
    return (-seen.x[:, 0]).exp()


def test_a_function_scales_the_band() -> None:
    model = small_mlp()
    predictor = ffcp.IntervalPredictor(model, scale=lambda seen: 1 + seen.x[:, 0].abs()).calibrate(
        X, Y
    )
    expected = ffcp.CP(model).score(X, Y) / (1 + X[:, 0].abs())
    torch.testing.assert_close(predictor.score(X, Y), expected)
    lengths = (lambda band: band.upper - band.lower)(predictor.predict_interval(NEW))
    ratio = lengths / (1 + NEW[:, 0].abs())
    torch.testing.assert_close(ratio, ratio[:1].expand(50))


def test_a_function_may_look_at_layers() -> None:
    scale = ffcp.scales.FunctionScale(
        lambda seen: 1 + seen.norms["0"][:, 0] + seen.values["3"].abs().sum(dim=1),
        norms=["0"],
        values=["3"],
    )
    model = small_mlp().eval()
    predictor = ffcp.IntervalPredictor(model, scale=scale).calibrate(X, Y)
    _, norms = ffcp.gradient_norms(model, X, ["0"])
    by_hand = 1 + norms["0"][:, 0] + model[:4](X).detach().abs().sum(dim=1)
    torch.testing.assert_close(predictor.score(X, Y), ffcp.CP(model).score(X, Y) / by_hand)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (lambda seen: 0 * seen.x[:, 0], r"\b0\b"),
        (lambda seen: seen.x[:, 0] / 0, "scale"),
        (lambda seen: torch.ones(3), "shape"),
    ],
)
def test_what_is_no_slack_is_refused(scale, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.IntervalPredictor(small_mlp(), scale=scale).calibrate(X, Y)


def test_a_bad_row_is_named_by_its_number_in_the_data() -> None:
    scale = ffcp.scales.FunctionScale(lambda seen: 1 - (seen.x[:, 0] == X[117, 0]).float())
    with pytest.raises(ValueError, match=r"\b117\b"):
        ffcp.IntervalPredictor(small_mlp(), scale=scale, batch_size=50).calibrate(X, Y)


def test_two_kinds_of_norm_in_one_pass_are_refused() -> None:
    scales = [ffcp.scales.GradientNorm("0", norm=1), ffcp.scales.GradientNorm("3", norm=2)]
    with pytest.raises(ValueError, match="norm=2"):
        ffcp.IntervalPredictor(small_mlp(), scale=scales)


# -- a choice among several --------------------------------------------------------------------


@pytest.mark.parametrize("order", [[guessing, knowing, wrong], [knowing, wrong, guessing]])
def test_the_slack_that_knows_the_noise_is_chosen(order: list) -> None:
    x, y = informed()
    predictor = ffcp.IntervalPredictor(Known(), scale=order).calibrate(x, y)
    assert predictor.scale.name == "function knowing"
    assert predictor.choice.feature == "function knowing"
    assert set(predictor.choice.candidates) == {
        "output", "function guessing", "function knowing", "function wrong"
    }  # fmt: skip
    assert len(predictor.calibration) == 800
    new = torch.randn(50, 1)
    band = predictor.predict_interval(new)
    ratio = (band.upper - band.lower) / new[:, 0].exp()
    torch.testing.assert_close(ratio, ratio[:1].expand(50))


def test_layers_and_functions_compete() -> None:
    x, y = informed()
    scales = [guessing, ffcp.scales.GradientNorm("part")]
    predictor = ffcp.IntervalPredictor(Known(), scale=scales).calibrate(x, y)
    assert predictor.feature == "part"
    named = ffcp.FFCP(Known(), "part")
    torch.testing.assert_close(predictor.score(x, y), named.score(x, y))


@pytest.mark.parametrize(
    "scales", [[guessing, knowing], [ffcp.scales.GradientNorm("part"), guessing]]
)
def test_the_choice_is_saved_and_loaded(scales: list, tmp_path: Path) -> None:
    x, y = informed()
    model, path = Known(), tmp_path / "bands.safetensors"
    saved = ffcp.IntervalPredictor(model, scale=scales).calibrate(x, y)
    saved.save(path)
    loaded = ffcp.IntervalPredictor(model, scale=scales).load(path)
    assert loaded.choice == saved.choice
    assert config(loaded) == config(saved)
    torch.testing.assert_close(
        loaded.predict_interval(x), saved.predict_interval(x), rtol=0, atol=0
    )
    with pytest.raises(ValueError, match="bands"):
        ffcp.IntervalPredictor(model, scale=[wrong, lambda seen: 1 + seen.x[:, 0].abs()]).load(path)


def test_plain_cp_is_among_them_saved_and_explained(tmp_path: Path) -> None:
    x, y = torch.randn(1000, 1), torch.randn(1000)
    model, path = Known(), tmp_path / "bands.safetensors"
    with pytest.warns(ffcp.FFCPWarning, match="function wrong"):
        saved = ffcp.IntervalPredictor(model, scale=[wrong]).calibrate(x, y)
    saved.save(path)
    loaded = ffcp.IntervalPredictor(model, scale=[wrong]).load(path)
    plain = ffcp.CP(model)
    assert config(loaded) == config(plain)
    torch.testing.assert_close(loaded.predict_interval(x), saved.predict_interval(x))


def test_slacks_that_cannot_be_told_apart_are_refused() -> None:
    scales = [lambda seen: 1 + seen.x[:, 0].abs(), lambda seen: 1 + seen.x[:, 1].abs()]
    with pytest.raises(ValueError, match="lambda"):
        ffcp.IntervalPredictor(small_mlp(), scale=scales)
    named = [ffcp.scales.FunctionScale(scale, name=f"scale {i}") for i, scale in enumerate(scales)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor = ffcp.IntervalPredictor(small_mlp(), scale=named).calibrate(X, Y)
    assert set(predictor.choice.candidates) == {"output", "scale 0", "scale 1"}


def test_an_open_slack_in_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match="feature"):
        ffcp.IntervalPredictor(small_mlp(), scale=[ffcp.scales.GradientNorm(), guessing])


def test_scores_before_the_choice() -> None:
    predictor = ffcp.IntervalPredictor(Known(), scale=[guessing, knowing])
    with pytest.raises(RuntimeError, match="calibrate"):
        predictor.score(*informed(10))
