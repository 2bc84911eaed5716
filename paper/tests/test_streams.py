"""Series in the order of time: every row is followed once, and the picture can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ffcp_paper.experiments import streams
from ffcp_paper.experiments.streams import Series


@pytest.mark.heavy
def test_every_row_is_followed_by_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(700, 2), torch.randn(700)
    y[500:] *= 4
    small = Series("small", x, y, 100, 100, 25, 1, {300: "noise x 4"})
    monkeypatch.setattr(streams, "series_of", lambda name, seed: small)
    result = streams.run("small")
    assert {len(one.hits) for one in result.tracked.values()} == {500}
    assert result.tracked["aci"].hits[350:].mean() > result.tracked["CP"].hits[350:].mean()
    assert result.alarms["target"] is not None
    assert len(streams.rows_of(result)) == 5
    streams.picture([result, result]).savefig(tmp_path / "stream.png")


def test_the_drawn_series_breaks_where_it_says() -> None:
    series = streams.series_of("break")
    start = series.train + series.calibrate
    assert list(series.marks) == [1000, 2000]
    before, after = series.x[: start + 2000].std(), series.x[start + 2000 :].std()
    assert 1.4 < float(after / before) < 1.8
