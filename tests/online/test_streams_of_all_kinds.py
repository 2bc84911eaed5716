"""Streams of predictors with groups, sides, localized and weighted calibrations."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffcp
from tests.conftest import normal, small_mlp
from tests.test_threads import together

X, NEW = normal(200, 4, seed=1), normal(240, 4, seed=3)
Y, TRUTH = normal(200, 1, seed=2), normal(240, 1, seed=4)
GROUPS = ["a", "b"] * 120
NEAR = ffcp.kernels.Localizer("gaussian", on="input", bandwidth=3.0)


def ratio(x: Tensor) -> Tensor:
    return (0.3 * x[:, 0]).exp()


def grouped(predictor: Any) -> Any:
    return predictor.calibrate(X, Y, groups=GROUPS[: len(X)])


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: ffcp.FFCP(small_mlp(), "0").calibrate(X, Y),
    "lower": lambda: ffcp.CP(small_mlp(), side="lower").calibrate(X, Y),
    "upper": lambda: ffcp.CP(small_mlp(), side="upper").calibrate(X, Y),
    "each": lambda: ffcp.CP(small_mlp(), side="each").calibrate(X, Y),
    "groups": lambda: grouped(ffcp.CP(small_mlp())),
    "localized": lambda: ffcp.LCP(small_mlp(), NEAR).calibrate(X, Y),
    "random": lambda: ffcp.LCP(small_mlp(), NEAR, guarantee="random", seed=0).calibrate(X, Y),
    "weighted": lambda: ffcp.CP(
        small_mlp(), calibration=ffcp.calibrations.Weighted(ratio)
    ).calibrate(X, Y),
    "localized in groups": lambda: grouped(ffcp.LCP(small_mlp(), NEAR)),
    "weighted in groups": lambda: grouped(
        ffcp.CP(small_mlp(), calibration=ffcp.calibrations.Weighted(ratio))
    ),
    "quantiles": lambda: ffcp.CQR(small_mlp(outputs=2)).calibrate(X, Y),
    "learned": lambda: ffcp.Learned(small_mlp(), seed=0).calibrate(X, Y),
}


def missed(band: ffcp.Interval, truth: Tensor) -> int:
    truth = truth.reshape(band.lower.shape)
    return int(((truth < band.lower) | (truth > band.upper)).sum())


STAY = ["localized", "random", "weighted", "localized in groups", "weighted in groups"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, "aci") for kind in KINDS] + [(kind, m) for kind in STAY for m in ("dtaci", "pid")],
)
def test_misses_are_truths_outside_the_bands_that_were_given(kind: str, method: str) -> None:
    online = ffcp.Online(KINDS[kind](), method, alpha=0.2, gamma=0.03)
    outside = 0
    for i in range(0, 240, 4):
        rows = slice(i, i + 4)
        given = {"groups": GROUPS[rows]} if "groups" in kind else {}
        band = online.predict_interval(NEW[rows], **given)
        outside += missed(band, TRUTH[rows])
        online.update(NEW[rows], TRUTH[rows])
    assert sum(online.misses) == outside  # with side="each" no truth is beyond both ends
    assert (online.bounds is None) == (method == "dtaci")
    asked = 0.1 if kind == "each" else 0.2
    for share, bound in zip(
        [m / t for m, t in zip(online.misses, online.observed, strict=True)],
        online.bounds or [1.0],
        strict=True,
    ):
        assert abs(share - asked) <= bound
    assert abs(outside / 240 - 0.2) < 0.08


def test_each_group_has_a_level_of_its_own() -> None:
    online = ffcp.Online(KINDS["groups"](), "aci", alpha=0.2, gamma=0.05)
    y = torch.where(torch.tensor([g == "a" for g in GROUPS])[:, None], TRUTH, 5 * TRUTH)
    for i in range(120):
        rows = slice(2 * i, 2 * i + 2)
        online.predict_interval(NEW[rows], groups=GROUPS[rows])
        online.update(NEW[rows], y[rows])
    known = online.groups
    assert known["a"].observed == known["b"].observed == [120]
    for progress in known.values():
        assert progress.bounds is not None
        assert abs(progress.misses[0] / 120 - 0.2) <= progress.bounds[0]
    levels = {label: own[0].levels()[0] for label, own in online._controls.items()}
    assert levels["b"] < levels["a"]
    with pytest.raises(ValueError, match="'c'"):
        online.predict_interval(NEW[:1], groups=["c"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "method"),
    [("groups", "aci"), ("each", "aci"), ("localized in groups", "dtaci"), ("weighted", "pid")],
)
def test_a_stream_of_any_kind_goes_on_where_it_was_saved(
    kind: str, method: str, tmp_path: Path
) -> None:
    predictor, path = KINDS[kind](), tmp_path / "stream"
    whole, cut = ffcp.Online(predictor, method), ffcp.Online(predictor, method)
    for i in range(0, 60, 3):
        rows = slice(i, i + 3)
        given = {"groups": GROUPS[rows]} if "groups" in kind else {}
        for online in (whole, cut):
            online.predict_interval(NEW[rows], **given)
        cut.save(path)  # while these wait
        cut = ffcp.Online(predictor, method).load(path)
        for online in (whole, cut):
            online.update(NEW[rows], TRUTH[rows])
    assert whole.state() == cut.state()


def test_another_calibration_of_the_predictor_does_not_reach_into_the_stream() -> None:
    predictor = KINDS["plain"]()
    online = ffcp.Online(predictor)
    before = online.predict_interval(NEW[:5])
    predictor.calibrate(X, 100 * Y)
    assert torch.equal(online.predict_interval(NEW[:5]).upper, before.upper)


def test_thresholds_below_every_score_give_the_prediction_alone() -> None:
    online, alone = ffcp.Online(KINDS["plain"](), "pid", saturation=0.05), 0
    for i in range(30):
        band = online.predict_interval(NEW[i : i + 1])
        assert bool((band.lower <= band.upper).all())
        online.update(NEW[i : i + 1], band.prediction)  # never missed: the threshold falls
        alone += torch.equal(band.lower, band.prediction) and torch.equal(band.upper, band.lower)
    assert sum(online.misses) == alone > 0


def test_what_fcp_misses_is_told_by_its_feature_band() -> None:
    predictor = ffcp.FCP(small_mlp(), "0", steps=2).calibrate(X, Y)
    online = ffcp.Online(predictor, "aci", alpha=0.2)
    online.predict_interval(NEW)
    online.update(NEW, TRUTH)
    assert online.misses[0] == round(240 * (1 - predictor.feature_coverage(NEW, TRUTH, 0.2)))


@pytest.mark.heavy
def test_many_threads_share_a_stream_and_copies_go_their_own_way() -> None:
    online = ffcp.Online(KINDS["groups"]())

    def some(start: int) -> Callable[[], None]:
        def job() -> None:
            for i in range(start, 240, 8):
                online.predict_interval(NEW[i : i + 1], groups=GROUPS[i : i + 1])
                online.update(NEW[i : i + 1], TRUTH[i : i + 1])

        return job

    assert not together(*(some(start) for start in range(8)))
    assert online.observed == [240]
    for other in (copy.deepcopy(online), pickle.loads(pickle.dumps(online))):
        other.predict_interval(NEW[:1], groups=["a"])
        assert other.rows == online.rows + 1
    assert online.rows == 240


def test_rows_that_wait_can_be_asked_for() -> None:
    online = ffcp.Online(KINDS["plain"]())
    online.predict_interval(NEW[:4])
    online.update(NEW[1:3], TRUTH[1:3])
    assert online.is_waiting(NEW[:5]) == [True, False, False, True, False]
    assert math.isfinite(sum(online.observed))
