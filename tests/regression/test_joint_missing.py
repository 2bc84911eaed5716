"""Several outputs at once where some targets are missing: what is promised, and of which rows."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp import conformal_rank
from tests.conftest import small_mlp
from tests.core import few_epochs
from tests.law import ERROR_RATE

OUTPUTS, ALPHA = 3, 0.2
JOINTS = [True, 0.6, "known", (0.6, "known")]


def problem(rows: int, share: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Give inputs, targets, and targets of which this share is missing completely at random."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    noise = torch.randn(rows, 1, generator=generator) + torch.randn(
        rows, OUTPUTS, generator=generator
    )
    y = noise * torch.tensor([0.1, 1.0, 10.0])
    return x, y, y.masked_fill(torch.rand(y.shape, generator=generator) < share, math.nan)


def model() -> nn.Module:
    return small_mlp(outputs=OUTPUTS)


def is_of_known(joint: Any) -> bool:
    return joint == "known" or isinstance(joint, tuple)


def hits(interval: Any, y: Tensor, joint: Any) -> Tensor:
    """Say which rows have enough of the outputs that count inside; NaN where a row does not."""
    share = joint[0] if isinstance(joint, tuple) else joint if isinstance(joint, float) else 1.0
    known = (~y.isnan()).sum(dim=1)
    inside = ((interval.lower <= y) & (y <= interval.upper)).sum(dim=1)
    enough = inside >= torch.ceil(share * known - 1e-6)
    return enough.double().masked_fill(known < (1 if is_of_known(joint) else OUTPUTS), math.nan)


@pytest.mark.parametrize("joint", [True, 0.6])
def test_all_outputs_are_calibrated_on_complete_rows_alone(joint: Any) -> None:
    x, _, y = problem(120, 0.3)
    whole = ~y.isnan().any(dim=1)
    scores = ffcp.CP(model(), joint=joint, output_scales=None, missing=True).score(x, y)
    assert torch.equal(scores.isnan(), ~whole)
    some = ffcp.CP(model(), joint=joint, output_scales=None, missing=True).calibrate(x, y)
    only = ffcp.CP(model(), joint=joint, output_scales=None).calibrate(x[whole], y[whole])
    assert torch.equal(some.predict_interval(x).upper, only.predict_interval(x).upper)


@pytest.mark.parametrize("method", [ffcp.CP, ffcp.FFCP, ffcp.FCP])
def test_known_outputs_are_calibrated_on_every_row_that_has_one(method: Any) -> None:
    x, _, y = problem(60, 0.5)
    y[0], y[1] = math.nan, torch.tensor([0.0, math.nan, 1.0])
    options = {"steps": 3} if method is ffcp.FCP else {"output_scales": None}
    scores = {
        joint: method(model(), "0", joint=joint, missing=True, **options).score(x, y)
        if method is not ffcp.CP
        else method(model(), joint=joint, missing=True, **options).score(x, y)
        for joint in (True, "known")
    }
    assert torch.equal(scores["known"].isnan(), y.isnan().all(dim=1))
    assert torch.equal(scores[True].isnan(), y.isnan().any(dim=1))
    whole = ~scores[True].isnan()
    assert torch.equal(scores[True][whole], scores["known"][whole])


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_too_few_complete_rows_give_infinite_intervals_and_say_how_many_would_do(
    groups: bool, weighted: bool
) -> None:
    x, _, y = problem(60, 0.1)
    y[5:, 1] = math.nan
    complete = int((~y.isnan().any(dim=1)).sum())
    ones = {"weights": torch.ones(60)} if weighted else {}
    calibration = ffcp.calibrations.Weighted("given") if weighted else None
    labels = {"groups": ["a"] * 60} if groups else {}
    predictor = ffcp.CP(
        model(), calibration=calibration, joint=True, missing=True, output_scales=None
    )
    predictor.calibrate(x, y, **ones, **labels)
    with pytest.warns(ffcp.FFCPWarning, match=r"\b9\b") as caught:
        interval = predictor.predict_interval(x, 0.1, **ones, **labels)
    assert bool(interval.upper.isinf().all())
    (said,) = [str(one.message) for one in caught]
    assert str(complete) in said
    assert "known" in said  # what to do


@pytest.mark.parametrize(
    "make",
    [
        lambda: ffcp.FCP(model(), "0", joint=True, missing=True),
        lambda: ffcp.FFCP(model(), joint=True, missing=True),
        lambda: ffcp.Auto(model(), joint=True, missing=True),
    ],
)
def test_nothing_is_chosen_where_no_row_is_complete(make: Any) -> None:
    x, y, _ = problem(120, 0.0)
    y[torch.arange(120), torch.arange(120) % OUTPUTS] = math.nan
    predictor = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ffcp.FFCPWarning)
        upper = predictor.calibrate(x, y).predict_interval(x).upper
    assert bool(upper.isinf().all())
    assert getattr(predictor, "feature", None) in ("output", "0", None)  # plain CP, or as given
    assert all("same size" not in str(one.message) for one in caught)


def test_a_share_of_outputs_and_each_side_do_not_go_together() -> None:
    for joint in (0.9, (0.9, "known")):
        with pytest.raises(ValueError, match="each"):
            ffcp.CP(model(), joint=joint, side="each", missing=True)
        with pytest.raises(ValueError, match="each"):
            ffcp.Auto(model(), joint=joint, side="each", missing=True)


def test_known_outputs_are_for_missing_targets() -> None:
    with pytest.raises(ValueError, match="missing"):
        ffcp.CP(model(), joint="known")
    for wrong in ("unknown", (0.9, "all"), (1.5, "known"), ("known",)):
        with pytest.raises(ValueError, match="joint"):
            ffcp.CP(model(), joint=wrong, missing=True)


@pytest.mark.parametrize("joint", JOINTS)
def test_merged_updated_and_loaded_predictors_are_the_same(joint: Any, tmp_path: Any) -> None:
    x, _, y = problem(90, 0.3)

    def made() -> ffcp.CP:
        return ffcp.CP(model(), joint=joint, missing=True, output_scales=[1.0, 2.0, 3.0])

    whole = made().calibrate(x, y)
    merged = made().calibrate(x[:40], y[:40])
    merged.merge(made().calibrate(x[40:], y[40:]))
    updated = made().calibrate(x[:40], y[:40]).calibrate(x[40:], y[40:], update=True)
    whole.save(tmp_path / "c.safetensors")
    again = ffcp.load(tmp_path / "c.safetensors", model())
    assert again.joint == joint
    for other in (merged, updated, again, made().load(tmp_path / "c.safetensors")):
        assert torch.equal(other.predict_interval(x).upper, whole.predict_interval(x).upper)


@pytest.mark.parametrize("joint", JOINTS)
def test_coverage_is_measured_on_the_rows_that_are_promised(joint: Any) -> None:
    x, _, holes = problem(200, 0.3)
    predictor = ffcp.CP(model(), joint=joint, missing=True).calibrate(x, holes)
    interval = predictor.predict_interval(x)
    expected = hits(interval, holes, joint)
    found = ffcp.metrics.coverage(interval, holes, joint=joint, missing=True)
    assert float(found) == pytest.approx(float(expected.nanmean()))
    monitor = ffcp.Monitor(predictor, seed=0)
    monitor.update(x, holes)
    share, _, _, rows_seen = monitor.coverage()[None]
    assert (share, rows_seen) == (pytest.approx(float(found)), int((~expected.isnan()).sum()))
    monitor.update(x[:1], holes[:1] * math.nan)  # nothing of this row is known
    monitor.update(x[:1], torch.tensor([[0.0, math.nan, 0.0]]))
    rows_seen += is_of_known(joint)
    assert monitor.coverage()[None][3] == rows_seen


# -- laws ----------------------------------------------------------------------------------------

MAKERS = {
    "CP": lambda joint: ffcp.CP(model(), joint=joint, missing=True),
    "FFCP": lambda joint: ffcp.FFCP(model(), joint=joint, missing=True),
    "Learned": lambda joint: ffcp.Learned(model(), joint=joint, missing=True),
    "Auto": lambda joint: ffcp.Auto(model(), joint=joint, missing=True),
}


@pytest.mark.heavy
@pytest.mark.parametrize("share", [0.2, pytest.param(0.6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("joint", JOINTS)
@pytest.mark.parametrize("name", MAKERS)
def test_promised_outputs_are_covered_at_once(
    name: str, joint: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs where these are promised, else those known in rows with the same missingness."""
    few_epochs(monkeypatch)  # coverage does not depend on how much is learned
    repeats, rows, asked = (1000, 60, 30) if name == "CP" else (30, 300, 200)
    excess = []
    for seed in range(repeats):
        x, y, holes = problem(rows + asked, share, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            predictor = MAKERS[name](joint).calibrate(x[:rows], holes[:rows])
            interval = predictor.predict_interval(x[rows:], ALPHA)
        target = holes[rows:] if is_of_known(joint) else y[rows:]
        covered = hits(interval, target, joint)
        n = int((~predictor.calibration.scores.isnan()).sum())
        rank = conformal_rank(n, ALPHA)
        promised = rank / (n + 1) if rank <= n else 1.0
        excess.append(float((covered - promised).nanmean()))
    assert stats.ttest_1samp(excess, 0).pvalue > ERROR_RATE or np.mean(excess) > 0
