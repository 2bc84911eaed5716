"""Mondrian calibration: one threshold per group, and clear words about groups."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ffcp
from tests.conftest import normal, small_mlp
from tests.core import scores_by_group, set_aside

X, Y = normal(120, 4, seed=0), normal(120, seed=1)
GROUPS = ["left" if x < 0 else "right" for x in X[:, 0].tolist()]
LEFT = X[:, 0] < 0
METHODS = {
    "CP": lambda: ffcp.CP(small_mlp()),
    "FFCP": lambda: ffcp.FFCP(small_mlp(), "0"),
    "CQR": lambda: ffcp.CQR(small_mlp(outputs=2)),
    "FFCQR": lambda: ffcp.FFCQR(small_mlp(outputs=2), "3"),
    "FCP": lambda: ffcp.FCP(small_mlp(), "0", steps=20),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_group_is_calibrated_by_its_own_points_alone(method: str) -> None:
    predictor = METHODS[method]().calibrate(X, Y, groups=GROUPS)
    band = predictor.predict_interval(X, groups=GROUPS)
    for inside in (LEFT, ~LEFT):
        alone = METHODS[method]().calibrate(X[inside], Y[inside]).predict_interval(X[inside])
        torch.testing.assert_close(band.upper[inside], alone.upper)
        torch.testing.assert_close(band.lower[inside], alone.lower)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["a", "b", "c", 7])), min_size=1, max_size=40
    ),
    st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    st.integers(0, 5),
)
def test_thresholds_are_those_of_each_group(
    points: list[tuple[int, str | int]], alpha: float, cut: int
) -> None:
    scores = torch.tensor([[float(s), -float(s)] for s, _ in points])
    labels = [label for _, label in points]
    by_group, zeros = ffcp.CP(ffcp.Stored(), side="upper"), torch.zeros_like(scores)
    for part in (slice(0, cut), slice(cut, None)):
        if labels[part]:
            by_group.calibrate(zeros[part], scores[part], groups=labels[part], update=True)
    upper = by_group.predict_interval(zeros, alpha, groups=labels).upper
    for row, label in enumerate(labels):
        own = scores[[i for i, other in enumerate(labels) if other == label]]
        torch.testing.assert_close(upper[row], ffcp.conformal_quantile(own, alpha))


@pytest.mark.parametrize(
    "groups",
    [
        GROUPS,
        np.array(GROUPS),
        (X[:, 0] < 0),
        (X[:, 0] < 0).numpy().astype(int),
        lambda x: x[:, 0] < 0,
        lambda x: ["left" if value < 0 else "right" for value in x[:, 0]],
    ],
)
def test_labels_of_any_kind(groups) -> None:
    expected = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    wanted = expected.predict_interval(X, groups=GROUPS).upper
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=groups)
    assert torch.equal(predictor.predict_interval(X, groups=groups).upper, wanted)


def test_loaders_take_groups_too() -> None:
    whole = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    for groups in (GROUPS, lambda x: ["left" if v < 0 else "right" for v in x[:, 0].tolist()]):
        loader = ((X[i : i + 17], Y[i : i + 17]) for i in range(0, 120, 17))
        stream = ffcp.CP(small_mlp()).calibrate(loader, groups=groups)
        assert stream.calibration.groups == whole.calibration.groups
        torch.testing.assert_close(stream.calibration.scores, whole.calibration.scores)


def test_the_automatic_choice_keeps_groups_with_their_points() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor = ffcp.FFCP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    kept = ~set_aside(120)
    labels = [g for g, k in zip(GROUPS, kept.tolist(), strict=True) if k]
    named = ffcp.FFCP(small_mlp(), predictor.feature)
    named.calibrate(X[kept], Y[kept], groups=labels)
    assert predictor.calibration.groups == named.calibration.groups
    torch.testing.assert_close(predictor.calibration.scores, named.calibration.scores)


@pytest.mark.long
def test_the_search_for_steps_keeps_groups_with_their_points() -> None:
    searched = ffcp.FCP(small_mlp(), "0").calibrate(X, Y, groups=GROUPS)
    kept = ~set_aside(120)
    labels = [g for g, k in zip(GROUPS, kept.tolist(), strict=True) if k]
    named = ffcp.FCP(small_mlp(), "0", steps=searched.steps)
    named.calibrate(X[kept], Y[kept], groups=labels)
    torch.testing.assert_close(searched.calibration.scores, named.calibration.scores)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "rows", "selected"),
    [
        (lambda f, **m: ffcp.FFCP(small_mlp(), f or ["0"]), 60_000, 10_000),
        (lambda f, **m: ffcp.FCP(small_mlp(), "0", **m), 6000, 1000),
    ],
    ids=["layer", "steps"],
)
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_a_long_stream_keeps_groups_with_their_points_after_the_selection(
    make: Any, rows: int, selected: int
) -> None:
    x, y, groups = normal(rows, 4, seed=2), normal(rows, seed=3), torch.arange(rows) % 97
    loader = zip(x.split(1000), y.split(1000), strict=True)
    predictor = make(None).calibrate(loader, groups=groups)
    assert len(predictor.calibration) == rows - selected
    steps = getattr(predictor, "steps", None)
    plain = make(predictor.feature, steps=steps).calibrate(x, y, groups=groups)
    left, everyone = scores_by_group(predictor), scores_by_group(plain)
    assert left.keys() == everyone.keys()
    for group, scores in left.items():
        known, found = everyone[group][:, 0], scores[:, 0]
        near = torch.searchsorted(known, found - 1e-5 * (1 + found.abs()))
        torch.testing.assert_close(known[near], found, rtol=1e-4, atol=1e-4)


def test_update_and_merge_join_groups() -> None:
    whole = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    grown = ffcp.CP(small_mlp()).calibrate(X[:50], Y[:50], groups=GROUPS[:50])
    other = ffcp.CP(small_mlp()).calibrate(X[50:], Y[50:], groups=GROUPS[50:])
    grown.merge(other)
    band = grown.predict_interval(X, groups=GROUPS)
    torch.testing.assert_close(band.upper, whole.predict_interval(X, groups=GROUPS).upper)
    again = ffcp.CP(small_mlp()).calibrate(X[:50], Y[:50], groups=GROUPS[:50])
    again.calibrate(X[50:], Y[50:], groups=GROUPS[50:], update=True)
    torch.testing.assert_close(again.calibration.scores, grown.calibration.scores)


@pytest.mark.parametrize("labels", [GROUPS, (X[:, 0] < 0).int()])
def test_groups_survive_saving(tmp_path: Path, labels) -> None:
    path = tmp_path / "groups.safetensors"
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=labels)
    predictor.save(path)
    loaded = ffcp.CP(small_mlp()).load(path)
    assert loaded.calibration.groups == predictor.calibration.groups
    band = loaded.predict_interval(X, groups=labels)
    assert torch.equal(band.upper, predictor.predict_interval(X, groups=labels).upper)


def test_an_unseen_group_is_named_with_those_there_are() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    with pytest.raises(ValueError, match="middle"):
        predictor.predict_interval(X[:2], groups=["left", "middle"])


def test_a_group_too_small_has_the_infinite_band() -> None:
    groups = ["few" if i < 5 else "many" for i in range(120)]
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=groups)
    with pytest.warns(ffcp.FFCPWarning, match="few"):
        band = predictor.predict_interval(X[:10], groups=groups[:10])
    assert band.upper[:5].isinf().all()
    assert band.upper[5:].isfinite().all()
    predictor.predict_interval(X[:10], groups=["many"] * 10)  # no warning: no one asked for it


def test_groups_at_one_end_only() -> None:
    grouped = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    with pytest.raises(ValueError, match="groups"):
        grouped.predict_interval(X)
    plain = ffcp.CP(small_mlp()).calibrate(X, Y)
    with pytest.raises(ValueError, match="groups"):
        plain.predict_interval(X, groups=GROUPS)
    with pytest.raises(ValueError, match="groups"):
        grouped.calibrate(X, Y, update=True)
    with pytest.raises(ValueError, match="groups"):
        plain.calibrate(X, Y, groups=GROUPS, update=True)
    with pytest.raises(ValueError, match="Mondrian"):
        plain.merge(grouped)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (GROUPS[:7], r"\b7\b"),
        ([*GROUPS, "left"], r"\b121\b"),
        ([math.nan] * 120, "nan"),
        ([None] * 120, "None"),
        (np.zeros((120, 2)), r"120, 2\)"),
        (lambda x: ["a"], "groups"),
    ],
)
def test_bad_labels(groups, message: str) -> None:
    predictor = ffcp.CP(small_mlp())
    with pytest.raises(ValueError, match=message):
        predictor.calibrate(X, Y, groups=groups)
    assert not len(predictor.calibration)


def test_as_many_labels_as_rows_at_prediction() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    with pytest.raises(ValueError, match="groups"):
        predictor.predict_interval(X[:2], groups=["left"] * 3)


def test_a_calibration_of_ones_own_is_asked_for_each_group_and_level() -> None:
    class Widest(ffcp.calibrations.Marginal):
        def quantile(self, alpha: Any, metadata: Any = None, random: Any = None) -> torch.Tensor:
            return self.scores.amax(dim=0) / float(alpha)

    y, groups = torch.arange(1.0, 9.0), ["a", "b"] * 4
    predictor = ffcp.CP(ffcp.Stored(), calibration=Widest())
    predictor.calibrate(torch.zeros(8), y, groups=groups)
    found = predictor.predict_interval(torch.zeros(1), (0.5, 0.25), groups=["a"])
    assert found.upper.flatten().tolist() == pytest.approx([14.0, 28.0])
