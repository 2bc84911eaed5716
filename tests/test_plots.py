"""What bands and sets say of themselves: widths, frames and pictures."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

import ffcp
from tests.conftest import normal, small_mlp

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pandas = pytest.importorskip("pandas")

X, Y = normal(300, 4, seed=0), normal(300, seed=1)
MANY = normal(300, 3, seed=2)


@pytest.fixture
def one() -> ffcp.CP:
    return ffcp.CP(small_mlp()).calibrate(X, Y)


@pytest.fixture
def three() -> ffcp.CP:
    return ffcp.CP(small_mlp(outputs=3)).calibrate(X, MANY)


@pytest.fixture(autouse=True)
def _close() -> Any:
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def test_a_band_is_a_tuple_that_knows_its_level(one: ffcp.CP) -> None:
    band = one.predict_interval(X, 0.2)
    lower, upper, prediction = band
    assert torch.equal(band.width, upper - lower)
    assert band.alpha == 0.2
    assert prediction is band.prediction
    again = pickle.loads(pickle.dumps(band))
    assert torch.equal(again.lower, lower)
    assert again.alpha == 0.2
    assert torch.equal(torch.as_tensor(band.contains(Y)), (lower <= Y) & (upper >= Y))
    assert band.contains(Y).double().mean() == float(ffcp.metrics.coverage(band, Y))


def test_contains_and_clip_take_several_levels(one: ffcp.CP) -> None:
    band = one.predict_interval(X, (0.1, 0.5))
    assert band.contains(Y).shape == (2, 300)
    cut = band.clip(0, 1)
    assert torch.equal(cut.lower, band.lower.clamp(0, 1))
    assert cut.alpha == band.alpha
    assert torch.equal(band.clip(high=0.5).upper, band.upper.clamp_max(0.5))
    with pytest.raises(ValueError, match="target"):
        band.contains(Y[:7])


def test_frames_of_one_output(one: ffcp.CP) -> None:
    frame = one.predict_interval(X, 0.1).to_frame(index=np.arange(300) + 5)
    assert list(frame.columns) == ["prediction", "lower", "upper"]
    assert frame.index[0] == 5
    several = one.predict_interval(X, (0.1, 0.05)).to_frame()
    assert list(several.columns) == [
        "prediction", "lower 0.1", "upper 0.1", "lower 0.05", "upper 0.05",
    ]  # fmt: skip
    np.testing.assert_array_equal(several["upper 0.1"], frame["upper"])


def test_frames_of_several_outputs(three: ffcp.CP) -> None:
    band = three.predict_interval(X, 0.1)
    frame = band.to_frame(names=["a", "b", "c"])
    np.testing.assert_array_equal(frame["b"]["lower"], band.lower[:, 1])
    assert band.to_frame().columns.names == ["output", "part"]
    with pytest.raises(ValueError, match="names"):
        band.to_frame(names=["a", "b"])


def test_frames_of_label_sets() -> None:
    labels = torch.arange(300) % 3
    model = small_mlp(outputs=3)
    sets = ffcp.LAC(model, names=["cat", "dog", "fox"]).calibrate(X, labels).predict_set(X[:5])
    frame = sets.to_frame(index=list("abcde"))
    assert frame["set"]["labels"].tolist() == sets.labels
    assert frame["set"]["size"].tolist() == sets.sizes.tolist()
    assert frame["holds"]["dog"].tolist() == sets.mask[:, 1].tolist()
    plain = ffcp.LAC(model).calibrate(X, labels).predict_set(X[:5]).to_frame()
    assert plain["holds"].columns.tolist() == [0, 1, 2]


def test_a_missing_package_is_named(one: ffcp.CP, monkeypatch: pytest.MonkeyPatch) -> None:
    band = one.predict_interval(X)
    for module in ("pandas", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pandas"):
        band.to_frame()
    with pytest.raises(ImportError, match="matplotlib"):
        band.plot()


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.1, (0.1, 0.5), tuple(np.arange(1, 20) / 20)])
def test_bands_are_drawn_as_areas_where_they_follow_the_axis(one: ffcp.CP, alpha: Any) -> None:
    ax = one.predict_interval(X, alpha).plot(y=Y)  # CP's ends follow the prediction
    levels = 1 if isinstance(alpha, float) else len(alpha)
    kinds = [type(artist).__name__ for artist in ax.collections]
    assert sum("Line" not in kind and "Path" not in kind for kind in kinds) >= levels
    assert ax.get_xlabel() == "prediction"
    assert len(ax.get_legend().get_texts()) <= 6
    ax.figure.canvas.draw()


def test_bands_that_jump_are_drawn_one_by_one(one: ffcp.CP) -> None:
    ax = one.predict_interval(X, 0.1).plot(X[:, 2], Y, xlabel="third")
    lines = [a for a in ax.collections if type(a).__name__ == "LineCollection"]
    assert len(lines) == 1
    assert 10 < len(lines[0].get_segments()) <= 80
    assert lines[0].get_color().mean() < 0.6  # thin bars are dark: 0.91 is the colour of an area
    assert ax.get_xlabel() == "third"


def test_several_outputs_have_panels_or_one_is_picked(three: ffcp.CP) -> None:
    band = three.predict_interval(X, 0.1)
    assert len(band.plot(y=MANY)) == 3
    picked = band.plot(y=MANY, output=2)
    assert picked.get_ylabel() == "target"
    with pytest.raises(ValueError, match="output="):
        band.plot(ax=picked)
    with pytest.raises(ValueError, match="7"):
        band.plot(X[:7, 0])


def test_infinite_ends_stay_inside_the_picture() -> None:
    band = ffcp.CP(small_mlp(), side="lower").calibrate(X, Y).predict_interval(X)
    assert all(np.isfinite(band.plot(y=Y).get_ylim()))


def test_the_calibration_curve_shows_what_was_measured(one: ffcp.CP) -> None:
    band = one.predict_interval(X, (0.1, 0.5, 0.3))
    ax = ffcp.plots.calibration_curve(band, Y)
    shown = next(line for line in ax.lines if line.get_marker() == "o")
    np.testing.assert_allclose(shown.get_xdata(), [0.5, 0.7, 0.9])
    wanted = [float(share) for share in ffcp.metrics.coverage(band, Y)]
    np.testing.assert_allclose(shown.get_ydata(), [wanted[1], wanted[2], wanted[0]])
    with pytest.raises(ValueError, match="alpha="):
        ffcp.plots.calibration_curve(one.predict_interval(X, 0.1), Y)


def test_coverage_of_groups_and_of_widths_is_drawn_as_measured(one: ffcp.CP) -> None:
    interval, groups = one.predict_interval(X, 0.2), (X[:, 0] > 0).numpy()
    ax = ffcp.plots.group_coverage(interval, Y, groups)
    measured = ffcp.metrics.group_coverage(interval, Y, groups).groups
    shown = ax.containers[0].lines[0].get_ydata()
    assert list(shown) == [float(share) for share in measured.values()]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["False", "True"]
    with pytest.raises(ValueError, match="width"):
        ffcp.plots.coverage_by_width(interval, Y)
    wide = ffcp.FFCP(small_mlp(), feature="0").calibrate(X, Y).predict_interval(X)
    assert len(ffcp.plots.coverage_by_width(wide, Y, slices=4).get_xticklabels()) == 4


def test_levels_of_a_fan_have_colours_of_their_own(one: ffcp.CP) -> None:
    ax = one.predict_interval(X, (0.05, 0.1, 0.2, 0.5)).plot()
    colours = {tuple(patch.get_facecolor()[0][:3]) for patch in ax.collections}
    assert len(colours) == 4
