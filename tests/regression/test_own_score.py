"""Interval scores of one's own: calibrated, merged, saved and refused as ours are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffcp
from tests.conftest import normal, small_mlp

X, Y = normal(600, 4, seed=0), normal(600, seed=1)


@dataclass(frozen=True)
class Asinh(ffcp.scores.IntervalScore):
    """Distances where large numbers lie closer together."""

    unit: float = 1.0

    def score(self, out: ffcp.BatchOutput, y: Tensor) -> Tensor:
        return (self._mapped(self.target(out, y)) - self._mapped(out.output)).abs()

    def region(self, out: ffcp.BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        middle = self._mapped(out.output)
        return (middle - q).sinh() * self.unit, (middle + q).sinh() * self.unit

    def _mapped(self, y: Tensor) -> Tensor:
        return (y.double() / self.unit).asinh()


class Weighed(Asinh):
    """A score that has learned a tensor."""

    weight = torch.ones(())

    def score(self, out: ffcp.BatchOutput, y: Tensor) -> Tensor:
        return super().score(out, y) / self.weight

    def region(self, out: ffcp.BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().region(out, q * self.weight)

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def with_state(self, state: Any) -> Weighed:
        made = Weighed(self.unit)
        object.__setattr__(made, "weight", state["weight"])
        return made


def test_intervals_hold_the_targets_whose_scores_are_small() -> None:
    model, score = small_mlp(), Asinh(0.5)
    predictor = ffcp.IntervalPredictor(model, score=score).calibrate(X[:300], Y[:300])
    band = predictor.predict_interval(X[300:], alpha=[0.1, 0.5])
    scores = predictor.score(X[300:], Y[300:])
    for level, alpha in enumerate((0.1, 0.5)):
        q = ffcp.conformal_quantile(predictor.score(X[:300], Y[:300])[:, None], alpha)
        assert torch.equal(band.contains(Y[300:])[level], scores <= q)
    assert predictor.scale is None
    assert predictor.feature is None
    assert predictor.output_scales is None


def test_each_group_has_its_threshold_and_parts_are_merged() -> None:
    model, groups = small_mlp(), (X[:, 0] > 0).long()
    parts = []
    for rows in (slice(0, 300), slice(300, 600)):
        part = ffcp.IntervalPredictor(model, score=Asinh())
        parts.append(part.calibrate(X[rows], Y[rows], groups=groups[rows]))
    whole = ffcp.IntervalPredictor(model, score=Asinh()).calibrate(X, Y, groups=groups)
    merged = parts[0].merge(parts[1]).predict_interval(X, groups=groups)
    assert torch.equal(merged.upper, whole.predict_interval(X, groups=groups).upper)
    other = ffcp.IntervalPredictor(model, score=Asinh(2.0)).calibrate(X, Y, groups=groups)
    with pytest.raises(ValueError, match="unit"):
        whole.merge(other)


@pytest.mark.parametrize("kind", [Asinh, Weighed])
def test_it_is_saved_with_its_fields_and_tensors(tmp_path: Path, kind: type[Asinh]) -> None:
    model, path, score = small_mlp(), tmp_path / "c.safetensors", kind(0.5)
    if isinstance(score, Weighed):
        score = score.with_state({"weight": torch.tensor(3.0)})
    predictor = ffcp.IntervalPredictor(model, score=score, support=(-9, 9), seed=3)
    predictor.calibrate(X, Y).save(path)
    loaded = ffcp.load(path, model, score=kind(0.5))
    assert loaded.support == predictor.support
    assert torch.equal(loaded.predict_interval(X).lower, predictor.predict_interval(X).lower)
    for given in ({}, {"score": kind(0.6)}, {"score": type("Other", (Asinh,), {})(0.5)}):
        with pytest.raises(ffcp.CalibrationFileError, match=kind.__name__):
            ffcp.load(path, model, **given)


@pytest.mark.parametrize(
    "given", [{"base": ffcp.scores.Point()}, {"scale": abs}, {"joint": True}, {"side": "lower"}]
)
def test_what_a_score_stands_in_place_of_is_refused_beside_it(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        ffcp.IntervalPredictor(small_mlp(), score=Asinh(), **given)


def test_what_only_our_scores_can_do_is_refused() -> None:
    predictor = ffcp.IntervalPredictor(small_mlp(), score=Asinh()).calibrate(X, Y)
    with pytest.raises(ValueError, match="distribution"):
        predictor.predict_distribution(X)
    with pytest.raises(ValueError, match="scales"):
        predictor.fit_output_scales(X, Y)
