"""The segmentation experiment and its command, on a network too small to be any good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ffcp_paper.cli import app
from ffcp_paper.data import label_maps
from ffcp_paper.experiments import segmentation
from ffcp_paper.figures import segmentation_maps
from ffcp_paper.networks import segmentation_nets

pytestmark = pytest.mark.heavy


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> segmentation.Experiment:
    """A small experiment in place of the shapes."""
    model = segmentation_nets.residual_net(4, width=4, outputs=4, hidden=4, dilations=(1,))
    pool = label_maps.shapes(36, size=(16, 24))
    made = segmentation.Experiment(
        "tiny shapes", model, pool.take(slice(0, 8)), pool.take(slice(8, 26)),
        pool.take(slice(26, 36)), label_maps.normalised, batch=5,
    )  # fmt: skip
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(segmentation, "FCP_STEPS", (1, 2))
    monkeypatch.setattr(segmentation, "FLOORS", (1e-6, 0.1))
    monkeypatch.setitem(segmentation.EXPERIMENTS, "shapes", lambda seed, progress: made)
    return made


def test_all_methods_are_measured(tiny: segmentation.Experiment) -> None:
    result = segmentation.run("shapes", alpha=0.2, drawn=2)
    assert [row.method for row in result.rows] == list(segmentation.METHODS)
    for row in result.rows:
        assert row.maps.shape == (2, 8, 12)
        assert 0 < row.coverage <= 1
        assert row.length > 0
    by_name = {row.method: row for row in result.rows}
    assert by_name["CP"].maps[0].equal(by_name["CP"].maps[1])  # CP's map knows no image
    assert not by_name["FFCP"].maps[0].equal(by_name["FFCP"].maps[1])
    assert len(result.sets) == 4
    assert all(1 <= row.size <= 4 for row in result.sets)


def test_lengths_are_averaged_over_boundaries_and_interiors(tiny: segmentation.Experiment) -> None:
    test = tiny.test.take(slice(0, 5))
    width = torch.where(label_maps.boundaries(test.labels, 2), 3.0, 1.0)[:, None].expand(
        -1, 4, -1, -1
    )
    sums = segmentation._Sums()
    middle = segmentation._targets(test)
    maps = sums.add(segmentation.Interval(middle - width / 2, middle + width / 2, middle), test)
    assert maps.shape == (5, 8, 12)
    assert sums.edge / sums.edges == pytest.approx(3)
    assert sums.inner / sums.inners == pytest.approx(1)
    assert sums.hits == sums.known == 5 * 4 * 8 * 12
    assert sums.length / sums.places == pytest.approx(float(maps.mean()))


def test_places_without_a_band_are_left_out_and_counted(tiny: segmentation.Experiment) -> None:
    test = tiny.test.take(slice(0, 2))
    middle = segmentation._targets(test)
    width = torch.ones_like(middle)
    width[:, :, 0, 0] = torch.inf
    sums = segmentation._Sums()
    maps = sums.add(segmentation.Interval(middle - width, middle + width, middle), test)
    assert sums.length / sums.places == pytest.approx(2)
    assert sums.infinite == 2
    assert maps.isfinite().sum() == 2 * (8 * 12 - 1)


def test_what_is_finished_is_not_computed_again(
    tiny: segmentation.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = segmentation.run("shapes", alpha=0.2, drawn=1)
    monkeypatch.setattr(segmentation, "_measure", lambda *args: pytest.fail("measured again"))
    again = segmentation.run("shapes", alpha=0.2, drawn=1)
    assert segmentation_maps.tabulate(again) == segmentation_maps.tabulate(first)
    assert segmentation_maps.tabulate_sets(again) == segmentation_maps.tabulate_sets(first)
    torch.testing.assert_close(again.rows[2].maps, first.rows[2].maps, rtol=1e-3, atol=0)


def test_the_command_prints_tables_and_draws_a_picture(
    tiny: segmentation.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = CliRunner().invoke(
        app, ["segment", "--alpha", "0.2", "--images", "2", "--out", str(tmp_path)]
    )
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert any(line.startswith("FFCP, 8 probes") for line in lines)
    assert "recall of each class: background" in " ".join(found.output.split())
    picture = tmp_path / "ffcp_segment_shapes.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "message"), [
    (["nothing"], "unknown network 'nothing': choose from shapes, camvid, deeplab"),
    (["--alpha", "2"], "must lie strictly between 0 and 1, got 2.0"),
    (["--out", "/no/such/folder"], "there is no folder /no/such/folder"),
])  # fmt: skip
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["segment", *arguments], env={"COLUMNS": "200"})
    assert found.exit_code == 2
    assert message in found.output


def test_missing_files_are_named(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        app, ["segment", "camvid"], env={"FFCP_DATA": str(tmp_path), "COLUMNS": "200"}
    )
    assert found.exit_code == 1
    assert "camvid_360x480_webp.npz is missing. It comes from" in found.output
    assert "ffcp-paper segment shapes needs no data" in found.output


def test_data_sets_are_listed(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["data"], env={"FFCP_DATA": str(tmp_path), "COLUMNS": "80"})
    assert found.exit_code == 0
    assert re.search(r"synthetic +built in", found.output)
    assert "meps21 is missing: run 'ffcp-paper data fetch meps21 --unverified'" in found.output


def test_unknown_data_sets_cannot_be_fetched() -> None:
    found = CliRunner().invoke(app, ["data", "fetch", "nothing"], env={"COLUMNS": "200"})
    assert found.exit_code == 2
    assert "unknown data set 'nothing': choose from synthetic, com" in found.output
