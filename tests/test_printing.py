"""Predictors, streams and monitors print in a few lines what a person wants to know."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ffcp

X, Y = torch.randn(300, 3), torch.randn(300)
MODEL = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")  # that CP was chosen
def test_a_predictor_names_method_model_and_rows() -> None:
    text = repr(ffcp.FFCP(MODEL, feature="0").calibrate(X, Y))
    assert text.splitlines()[0] == "FFCP: calibrated on 300 rows"
    assert "Sequential, 41 parameters" in text
    assert "feature='0'" in text
    assert repr(ffcp.CP(MODEL)).startswith("CP: not calibrated yet")
    chosen = ffcp.FFCP(MODEL, seed=0).calibrate(X, Y)
    aside = 300 - len(chosen.calibration)
    assert f"{aside} more selected" in repr(chosen)


def test_notebooks_show_the_lines_of_print() -> None:
    predictor = ffcp.CP(MODEL).calibrate(X, Y)
    for shown in (predictor, ffcp.Online(predictor), ffcp.Monitor(predictor)):
        assert shown._repr_html_().startswith("<pre>")
        assert str(shown).splitlines()[0].split(":")[0] in shown._repr_html_()


def test_a_stream_says_how_many_targets_came_and_were_covered() -> None:
    online = ffcp.Online(ffcp.CP(MODEL).calibrate(X[:200], Y[:200]), "aci", alpha=0.2)
    for row in range(200, 240):
        online.predict_interval(X[row : row + 1])
        online.update(X[row : row + 1], Y[row : row + 1])
    text = repr(online)
    assert "80 %" in text
    share = 1 - online.misses[0] / 40
    assert f"40 targets, {share:.1%}" in text


def test_a_monitor_explains_its_columns() -> None:
    monitor = ffcp.Monitor(ffcp.CP(MODEL).calibrate(X[:200], Y[:200]))
    monitor.update(X[200:], Y[200:])
    text = str(monitor)
    assert repr(monitor) == text
    for column in ("value", "most", "limit"):
        assert f"\n{column}:" in text
    assert max(map(len, text.splitlines())) <= 100
