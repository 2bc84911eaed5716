"""The figures: three files each, words in all of them, and the numbers they show."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from ffcp import CP, FFCP
from ffcp_paper.data import label_maps
from ffcp_paper.experiments import segmentation
from ffcp_paper.experiments.square_conditions import Spread, spreads
from ffcp_paper.experiments.tasks import Settings
from ffcp_paper.figures import band_plots, drawing, paper_figures, score_plots
from ffcp_paper.figures.drawing import Request
from ffcp_paper.figures.score_plots import Pair
from ffcp_paper.networks import segmentation_nets
from ffcp_paper.networks.regression import mlp
from ffcp_paper.page import run_files

pytestmark = pytest.mark.heavy

TINY = Settings(seeds=1, epochs=2, rows=300, only=("synthetic",))
SCORES = ("scores_fcp_ffcp", "score_histograms")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_folders(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(cache))
    monkeypatch.setenv("FFCP_DATA", str(tmp_path / "no-data"))


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> segmentation.Experiment:
    """A small experiment in place of the shapes."""
    model = segmentation_nets.residual_net(4, width=4, outputs=4, hidden=4, dilations=(1,))
    pool = label_maps.shapes(50, size=(12, 16))
    made = segmentation.Experiment(
        "tiny shapes", model, pool.take(slice(0, 24)), pool.take(slice(24, 44)),
        pool.take(slice(44, 50)), label_maps.normalised, batch=8,
    )  # fmt: skip
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(segmentation, "FCP_STEPS", (1, 2))
    monkeypatch.setattr(segmentation, "FLOORS", (1e-6, 0.1))
    monkeypatch.setitem(segmentation.EXPERIMENTS, "shapes", lambda seed, progress: made)
    return made


def _check_files(folder: Path, name: str) -> dict[str, str]:
    """Check the three files of a figure, and return its words."""
    place = folder / "figures" / name
    svg = ElementTree.parse(place.with_suffix(".svg")).getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert any((text.text or "").strip() for text in svg.iter("{http://www.w3.org/2000/svg}text"))
    png = place.with_suffix(".png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(png[16:20], "big") >= 1200  # pixels wide
    words: dict[str, str] = json.loads(place.with_suffix(".json").read_text(encoding="utf-8"))
    assert set(words) == {"title", "caption", "alt"}
    assert all(len(text) > 10 for text in words.values())
    assert "nan" not in words["caption"].split()
    return words


def test_figures_are_written_in_three_files_with_words(tmp_path: Path) -> None:
    steps: list[tuple[float, float, str]] = []
    made = paper_figures.write([], tmp_path, TINY, lambda *step: steps.append(step))
    # Segmentation takes long; it is not there, and nobody asked for it.
    assert made == ["overview", *SCORES]
    found = {name: _check_files(tmp_path, name) for name in made}
    assert all("quick run" in words["caption"] for words in found.values())
    assert "synthetic" in found["score_histograms"]["caption"]
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == set(made)
    done = [step[0] for step in steps]
    assert done == sorted(done)
    assert steps[-1][0] == steps[-1][1] == sum(map(paper_figures.cost, made))
    assert all(0 <= share <= total and text for share, total, text in steps)


def test_only_the_figures_asked_for_are_written(tmp_path: Path) -> None:
    assert paper_figures.write(["score_histograms"], tmp_path, TINY) == ["score_histograms"]
    assert len(list((tmp_path / "figures").iterdir())) == 3


def test_the_same_figure_gives_the_same_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        paper_figures.write(["score_histograms"], tmp_path / folder, TINY)
    for one in (tmp_path / "one" / "figures").iterdir():
        assert one.read_bytes() == (tmp_path / "two" / "figures" / one.name).read_bytes()


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pie"):
        paper_figures.write(["overview", "pie"], tmp_path, TINY)
    assert not (tmp_path / "figures").exists()


def test_a_figure_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_figures, "_rendered", lambda figure, kind: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        paper_figures.write(["score_histograms"], tmp_path, TINY)
    assert not (tmp_path / "figures").exists()


def test_the_report_shows_the_figures(tmp_path: Path) -> None:
    paper_figures.write(["score_histograms"], tmp_path, TINY)
    read = run_files.read_figure(tmp_path / "figures", "score_histograms")
    assert read.address is not None
    assert read.address.startswith("data:image/svg+xml")


def test_titles_show_the_rank_correlation_of_the_points_drawn() -> None:
    drawn = score_plots.scores_fcp_ffcp(Request(TINY))
    assert len(drawn.figure.axes) == 8
    for number, axis in enumerate(drawn.figure.axes):
        x, y = np.asarray(axis.collections[0].get_offsets()).T
        split, shown = re.findall(r"-?\d+\.?\d*", axis.get_title(loc="left"))
        assert int(split) == number % 4
        assert float(shown) == pytest.approx(stats.spearmanr(x, y).statistic, abs=0.0051)
        assert axis.get_xscale() == axis.get_yscale() == "log"


def test_both_scores_are_taken_at_the_same_layer() -> None:
    # Through a linear head the exact distance in the maximum norm is the residual over the sum of
    # the gradient's absolute values, which is FFCP's score with that norm.
    layers = [nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)]
    between = [nn.Identity(), nn.Identity()]  # in the place of ReLU and dropout
    model = nn.Sequential(*[part for layer in layers[:3] for part in (layer, *between)], layers[3])
    pairs = score_plots.score_pairs(model, torch.rand(40, 3), torch.rand(40), alpha=0.1, seed=0)
    assert [pair.split for pair in pairs] == [0, 1, 2, 3] * 2
    for pair in pairs[4:]:
        torch.testing.assert_close(pair.matched, pair.fcp, rtol=1e-3, atol=1e-6)


def test_points_that_have_no_place_on_the_axes_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.linspace(0.1, 1, 20, dtype=torch.float64)[:, None]
    lost = scores.clone()
    lost[3], lost[7] = math.inf, 0.0
    monkeypatch.setattr(score_plots.FCP, "score", lambda self, x, y: lost)
    monkeypatch.setattr(score_plots.FFCP, "score", lambda self, x, y: scores)
    pair = score_plots.score_pairs(mlp(2), torch.rand(20, 2), torch.rand(20), alpha=0.1, seed=0)[0]
    assert (pair.left_out, len(pair.fcp), pair.rank_correlation) == (2, 18, pytest.approx(1))


def test_rank_correlation_with_the_matching_norm() -> None:
    one, two = torch.rand(30), torch.rand(30)
    pair = Pair(0, "exact", one, two, two, 0, None)
    assert pair.rank_correlation == pytest.approx(stats.spearmanr(one, two).statistic)
    assert pair.matched_correlation == pytest.approx(1)


def test_distances_from_the_quantile() -> None:
    spread = Spread("FFCP", torch.tensor([1.0, 2.0, 6.0]), quantile=3.0, norm=2.0)
    assert spread.distance == pytest.approx(2)
    assert spread.shortfall == pytest.approx(0)
    assert spread.scaled == pytest.approx(4)
    assert spread.half_length == pytest.approx(6)


def test_spreads_are_those_of_the_bands() -> None:
    model, x, y = mlp(2).eval(), torch.rand(200, 2), torch.rand(200)
    found = spreads(model, x, y, 0.1, [2])
    for spread, made in zip(found, (CP(model), FFCP(model, "3")), strict=True):
        band = made.calibrate(x, y).predict_interval(x, 0.1)
        assert spread.half_length == pytest.approx(float((band.upper - band.lower).mean()) / 2)
        inside = float((spread.scores <= spread.quantile).double().mean())
        assert inside == pytest.approx(0.905)  # 181 of 200


def test_a_histogram_needs_a_quantile() -> None:
    with pytest.raises(ValueError, match=r"\b8\b"):
        score_plots.score_histograms(Request(replace(TINY, rows=20)))


def test_the_overview_shows_the_same_points_three_times() -> None:
    drawn = band_plots.overview(Request(TINY))
    axes = drawn.figure.axes
    assert [axis.get_title(loc="left").split("\n")[0] for axis in axes] == ["CP", "FCP", "FFCP"]
    points = []
    for axis in axes:
        marks = [c for c in axis.collections if c.get_label() in ("covered", "missed")]
        drawn_at = np.concatenate([np.asarray(c.get_offsets()) for c in marks])
        points.append(drawn_at[np.lexsort(drawn_at.T)])
    np.testing.assert_array_equal(points[0], points[1])
    np.testing.assert_array_equal(points[0], points[2])
    lower, upper = (axes[0].lines[k].get_ydata() for k in (0, 1))
    widths = np.asarray(upper) - np.asarray(lower)
    assert np.ptp(widths) < 1e-5 * widths.mean()  # CP has one width


def test_the_data_set_is_bike_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawing.default_data(Settings()) == "synthetic"
    monkeypatch.setattr(drawing, "available", lambda name: True)
    assert drawing.default_data(Settings()) == "bike"
    assert drawing.default_data(TINY) == "synthetic"
    assert drawing.default_data(Settings(only=("com",))) == "com"


def test_segmentation_is_drawn_when_asked_for(
    tiny_shapes: segmentation.Experiment, tmp_path: Path
) -> None:
    assert paper_figures.write(["segmentation_shapes"], tmp_path, TINY) == ["segmentation_shapes"]
    measured = list((tmp_path / "cache" / "segments").iterdir())
    assert len(measured) == 3  # CP, FCP and FFCP; nothing that is not shown
    words = _check_files(tmp_path, "segmentation_shapes")
    assert "tiny shapes" in words["title"]
    assert "tiny shapes" in words["caption"]


def test_segmentation_is_drawn_unasked_in_full_runs_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(
        name.startswith("segmentation") for name in paper_figures.available_figures(TINY)
    )
    drawn = [
        name
        for name in paper_figures.available_figures(Settings())
        if name.startswith("segmentation")
    ]
    assert drawn == ["segmentation_shapes"]  # the others need files
    assert [file.path for file in paper_figures.missing("segmentation_camvid")] == [
        label_maps.CAMVID_FILE.path
    ]
    monkeypatch.setenv("FFCP_DATA", str(tmp_path))
    place = label_maps.CAMVID_FILE.place
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    drawn = [
        name
        for name in paper_figures.available_figures(Settings())
        if name.startswith("segmentation")
    ]
    assert drawn == ["segmentation_shapes", "segmentation_camvid"]
