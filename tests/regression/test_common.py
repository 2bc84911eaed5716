"""What all methods take is written once: unknown words are refused, files say what was given."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import ffcp
from tests.conftest import normal, small_mlp

X, Y = normal(120, 4, seed=0), normal(120, seed=1)
BANDS = [ffcp.IntervalPredictor, ffcp.CP, ffcp.CQR, ffcp.FFCP, ffcp.FFCQR, ffcp.LCP, ffcp.FFLCP]
SETS = [ffcp.LAC, ffcp.APS, ffcp.RAPS, ffcp.FFRAPS]


@pytest.mark.parametrize("method", [*BANDS, *SETS])
def test_an_unknown_keyword_is_named_and_the_known_ones_are_listed(method: Any) -> None:
    with pytest.raises(TypeError, match="jiont") as caught:
        method(small_mlp(), jiont=True)
    for word in ("seed", "batch_size", "output"):
        assert word in str(caught.value)


def test_those_that_need_more_refuse_unknown_keywords_too() -> None:
    with pytest.raises(TypeError, match="sides"):
        ffcp.FCP(small_mlp(), "0", sides="lower")
    with pytest.raises(TypeError, match="missing"):
        ffcp.SetPredictor(small_mlp(), lambda seen: seen.output, missing=True)


@pytest.mark.parametrize("method", BANDS)
def test_help_names_the_common_keywords(method: Any) -> None:
    text = inspect.getdoc(method) or ""
    assert "common" in text or "Parameters are those of" in text or ":class:`LCP`" in text
    assert inspect.signature(method).parameters["common"].kind is inspect.Parameter.VAR_KEYWORD
    for word in ("joint", "side", "support", "missing", "selection_fraction", "seed", "batch_size"):
        assert f"\n{word} : " in (inspect.getdoc(ffcp.IntervalPredictor) or "")


def test_what_was_given_comes_back_from_a_file(tmp_path: Path) -> None:
    model = small_mlp()
    given: dict[str, Any] = {"side": "each", "support": (None, 9), "seed": 3, "batch_size": 7}
    predictor = ffcp.FFCP(model, "0", **given).calibrate(X, Y)
    predictor.save(tmp_path / "c.safetensors")
    again = ffcp.load(tmp_path / "c.safetensors", model)
    assert (again.side, again.support, again.seed, again.batch_size) == (
        "each",
        (-torch.inf, 9),
        3,
        7,
    )
    assert torch.equal(again.predict_interval(X).lower, predictor.predict_interval(X).lower)


def test_missing_targets_of_localized_methods_are_refused_when_made() -> None:
    with pytest.raises(ValueError, match="Local"):
        ffcp.LCP(small_mlp(), missing=True)
