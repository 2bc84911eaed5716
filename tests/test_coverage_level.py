"""Coverage levels at every entry point: alpha or confidence_level, and no other name."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ffcp
from ffcp.conformal.rank import requested_alpha, requested_alphas
from ffcp.segmentation import PixelSets
from ffcp.sklearn import ConformalClassifier, ConformalRegressor
from tests.conftest import normal, small_mlp

X, Y = normal(200, 4, seed=0), normal(200, seed=1)
LABELS = torch.arange(200) % 3
GAMES = normal(30, 2, 4, 4, seed=2)


def band() -> Callable[..., Any]:
    return ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval


def called() -> Callable[..., Any]:
    return ffcp.CP(small_mlp()).calibrate(X, Y)


def folds() -> Callable[..., Any]:
    made = ffcp.CrossConformal([small_mlp(), small_mlp()], np.arange(200) % 2)
    return made.calibrate(X, Y).predict_interval


def sets() -> Callable[..., Any]:
    made = ffcp.RAPS(small_mlp(outputs=3), randomized=False)
    return made.calibrate(X, LABELS).predict_set


def pixels() -> Callable[..., Any]:
    torch.manual_seed(0)
    made = PixelSets(nn.Conv2d(2, 3, 1)).calibrate(GAMES, torch.zeros(30, 4, 4).long())
    return lambda x, *args, **more: made.predict_set(GAMES[:3], *args, **more)


def stored() -> Callable[..., Any]:
    values = X[:, 0].numpy(), Y.numpy(), X[:9, 0].numpy()
    return lambda x, *args, **more: ffcp.intervals_from(*values, *args, **more)


def regressor() -> Callable[..., Any]:
    made = ConformalRegressor(small_mlp(), method="cp").fit(X.numpy(), Y.numpy())
    return lambda x, *args, **more: made.predict_interval(x.numpy(), *args, **more)


def classifier() -> Callable[..., Any]:
    made = ConformalClassifier(small_mlp(outputs=3), method="lac").fit(X.numpy(), LABELS.numpy())
    return lambda x, *args, **more: made.predict_set(x.numpy(), *args, **more)


def stream() -> Callable[..., Any]:
    made = ffcp.CP(small_mlp()).calibrate(X, Y)
    return lambda x, *args, **more: ffcp.Online(made, "plain", *args, **more).predict_interval(x)


ENTRY_POINTS: dict[str, Callable[[], Callable[..., Any]]] = {
    "predict_interval": band, "forward": called, "CrossConformal": folds, "predict_set": sets,
    "PixelSets": pixels, "intervals_from": stored, "ConformalRegressor": regressor,
    "ConformalClassifier": classifier, "Online": stream,
}  # fmt: skip


def numbers(found: Any) -> torch.Tensor:
    """Give all numbers of an interval, or a set."""
    if isinstance(found, np.ndarray):
        return torch.from_numpy(found)
    return found.mask if hasattr(found, "mask") else torch.stack([*found])


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_every_door_takes_a_confidence_level_in_place_of_alpha(
    entry_point: Callable[[], Callable[..., Any]],
) -> None:
    ask = entry_point()
    assert numbers(ask(X[:9], confidence_level=0.8)).equal(numbers(ask(X[:9], alpha=0.2)))
    assert numbers(ask(X[:9])).equal(numbers(ask(X[:9], confidence_level=0.9)))
    with pytest.raises(TypeError, match="confidence_level"):
        ask(X[:9], alpha=0.1, confidence_level=0.9)
    for wrong in (1.5, 0, "0.9"):
        with pytest.raises((TypeError, ValueError), match="confidence_level"):
            ask(X[:9], confidence_level=wrong)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
@pytest.mark.parametrize("name", ["confidence", "significance", "coverage"])
def test_every_door_says_alpha_where_another_name_is_given(
    entry_point: Callable[[], Callable[..., Any]], name: str
) -> None:
    with pytest.raises(TypeError, match=name):
        entry_point()(X[:9], **{name: 0.95})


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_every_door_warns_of_an_alpha_that_asks_for_little(
    entry_point: Callable[[], Callable[..., Any]],
) -> None:
    ask = entry_point()
    with pytest.warns(ffcp.FFCPWarning, match="alpha=0.9") as got:
        ask(X[:9], alpha=0.9)
    assert [one.filename for one in got] == [__file__]  # once, and at the user's line
    with pytest.warns(ffcp.FFCPWarning, match="confidence_level=0.1"):
        ask(X[:9], confidence_level=0.1)
    with pytest.raises(TypeError, match="sed"):
        ask(X[:9], sed=1)


def test_what_is_asked_for_is_exact() -> None:
    assert requested_alpha(None) == Fraction(1, 10)
    assert requested_alpha(None, 0.95) == requested_alpha(0.05) == Fraction(1, 20)
    assert requested_alpha(None, default=Fraction(9, 10)) == Fraction(9, 10)
    assert requested_alphas(None, (0.9, Decimal("0.95"))) == (
        [Fraction(1, 10), Fraction(1, 20)],
        True,
    )
    assert requested_alphas((0.1, 0.9)) == ([Fraction(1, 10), Fraction(9, 10)], True)  # a fan
    with pytest.warns(ffcp.FFCPWarning, match="alpha=0.9"):
        requested_alphas((0.95, 0.9))
    assert requested_alpha(0.5) == Fraction(1, 2)
    with pytest.raises(TypeError, match="alpha"):
        requested_alpha((0.1, 0.2))


def test_several_confidence_levels_come_from_one_pass() -> None:
    ask = band()
    several, alphas = ask(X[:9], confidence_level=(0.9, 0.8)), ask(X[:9], (0.1, 0.2))
    assert torch.equal(several.lower, alphas.lower)
    assert several.alpha == (0.1, 0.2)


def test_pac_coverage_is_called_pac() -> None:
    ask = band()
    assert torch.all(ask(X[:9], 0.1, pac=0.95).width > ask(X[:9], 0.1).width)
    assert torch.equal(ask(X[:9], confidence_level=0.9, pac=0.95).lower, ask(X[:9], pac=0.95).lower)


def test_quantiles_and_curves_of_any_level_are_no_mistake() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    predictor.predict_distribution(X[:3]).quantile((0.9, 0.95))
    predictor.predict_interval(X[:3], Fraction(9, 10))  # written by someone who knows


def test_a_stream_and_a_monitor_warn_when_they_are_made_and_not_again() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    with pytest.warns(ffcp.FFCPWarning, match="alpha=0.9"):
        online = ffcp.Online(predictor, "aci", alpha=0.9)
    online.predict_interval(X[:3])
    online.update(X[:3], Y[:3])
    with pytest.warns(ffcp.FFCPWarning, match="alpha=0.9"):
        monitor = ffcp.Monitor(predictor, alpha=0.9)
    monitor.update(X[:3], Y[:3])
    assert ffcp.Monitor(predictor, confidence_level=0.8).alpha == Fraction(1, 5)
    assert ffcp.Online(predictor, confidence_level=0.8).alpha == Fraction(1, 5)


def test_the_level_of_an_estimator_is_that_of_its_predictions() -> None:
    x, y = X.numpy(), Y.numpy()
    given = ConformalRegressor(small_mlp(), method="cp", confidence_level=0.8).fit(x, y)
    alpha = ConformalRegressor(small_mlp(), method="cp", alpha=0.2).fit(x, y)
    assert np.array_equal(given.predict_interval(x), alpha.predict_interval(x))
    assert not np.array_equal(given.predict_interval(x), given.predict_interval(x, 0.1))
    both = ConformalRegressor(small_mlp(), method="cp", alpha=0.2, confidence_level=0.8)
    with pytest.raises(TypeError, match="confidence_level"):
        both.fit(x, y)


def test_a_risk_is_no_coverage() -> None:
    risk = ffcp.RiskControl(small_mlp(outputs=3)).calibrate(X, normal(200, 3, seed=3) > 0)
    risk.predict_set(X[:3], alpha=0.6)  # of a mean loss, which may be any
    for name in ("confidence_level", "confidence"):
        with pytest.raises(TypeError, match="alpha"):
            risk.predict_set(X[:3], **{name: 0.9})


@pytest.mark.long
@pytest.mark.usefixtures("torch_that_exports")
def test_a_file_is_written_for_a_confidence_level(tmp_path: Path) -> None:
    import onnxruntime

    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    predictor.export(tmp_path / "cp.onnx", X, confidence_level=(0.9, 0.8))
    names = [one.name for one in onnxruntime.InferenceSession(tmp_path / "cp.onnx").get_outputs()]
    assert names == ["prediction", "lower_0.1", "upper_0.1", "lower_0.2", "upper_0.2"]
    predictor.export(tmp_path / "cp.onnx", X, confidence_level=0.8)
    for wrong, match in (
        ({"alphas": (0.2,), "confidence_level": 0.8}, "confidence_level"),
        ({"confidence": 0.8}, "alpha"),
    ):
        with pytest.raises(TypeError, match=match):
            predictor.export(tmp_path / "no.onnx", X, **wrong)
    assert not (tmp_path / "no.onnx").exists()


@pytest.mark.long
def test_tables_take_a_confidence_level(tmp_path: Path) -> None:
    from ffcp.cli.app import app

    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.normal(size=600), "b": random.normal(size=600)})
    frame["y"] = frame["a"] + random.normal(size=600)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    say = CliRunner().invoke
    common = [str(tmp_path / "rows.csv"), "--target", "y", "--minutes", "0.01"]
    made = say(app, ["fit", *common, "--confidence-level", "0.8"])
    assert made.exit_code == 0, made.output
    fitted = ffcp.tables.load(tmp_path / "rows.ffcp")
    assert fitted.about.alpha == 0.2
    assert say(app, ["fit", *common, "--alpha", "0.1", "--confidence-level", "0.9"]).exit_code == 2
    one, other = fitted.predict(frame, confidence_level=0.7), fitted.predict(frame, alpha=0.3)
    assert one.equals(other)
    folder = [str(tmp_path / "rows.ffcp"), str(tmp_path / "rows.csv")]
    for asked in (["--confidence-level", "0.7"], ["--alpha", "0.3"]):
        out = tmp_path / f"{asked[0]}.csv"
        assert say(app, ["predict", *folder, "--out", str(out), *asked]).exit_code == 0
        assert say(app, ["check", *folder, *asked]).exit_code in (0, 1)
    written = [(tmp_path / f"--{name}.csv").read_text() for name in ("confidence-level", "alpha")]
    assert written[0] == written[1]
    noted = say(app, ["predict", *folder, "--alpha", "0.9"])
    assert noted.output.count("Note: alpha=0.9 asks for coverage 0.1") == 1
    for wrong in ({"alpha": 0.1, "confidence_level": 0.9}, {"confidence": 0.9}):
        with pytest.raises(TypeError, match="alpha"):
            fitted.predict(frame, **wrong)
        with pytest.raises(TypeError, match="alpha"):
            ffcp.tables.fit(frame, "y", minutes=0.01, **wrong)
