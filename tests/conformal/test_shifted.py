"""Localized calibration with density ratios: exact bands by hand, laws, files, and refusals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ffcp
from ffcp import Localizer, Weighted, WeightedLocal
from tests.conformal.test_shift_law import Zero, coverages, too_low, true_ratio
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE

KERNELS = ("gaussian", "laplace", "box", "nearest")


def localizer(kernel: str, width: float = 0.8) -> Localizer:
    return Localizer(kernel, on="input", bandwidth=15 if kernel == "nearest" else width)


def ready(calibration: Any, seed: int = 0, rows: int = 60) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A calibration with points, their scores and inputs, and some new inputs."""
    x, scores = normal(rows, 2, seed=seed), normal(rows, 1, seed=seed + 1).abs().double()
    weight = (x[:, 0] * 0.7).exp().double()
    columns = {"embedding": x}
    if isinstance(calibration, WeightedLocal):
        columns["weight"] = weight
    calibration.add(scores, columns)
    return calibration, x, scores[:, 0], weight


def by_hand(
    kernel: str, x: Tensor, v: Tensor, w: Tensor, new: Tensor, own: float, alpha: str
) -> float:
    """Try every score as the new one's: shares of all points, and what those below count."""
    n, points = len(x), torch.cat([x, new[None]]).double()
    squared = (points[:, None] - points).square().sum(dim=2)
    near: Tensor = squared <= 0.8**2
    if kernel == "nearest":
        squared.fill_diagonal_(-1.0)
        near = squared.argsort(dim=1).argsort(dim=1) <= 15
    ratio = [Fraction(float(one)) for one in w] + [Fraction(own)]
    wanted = (1 - Fraction(alpha)) * sum(ratio)
    for end in v.sort().values.tolist():
        # Just above this score, that is, in the band if the band does not end at it.
        scores = torch.cat([v, torch.tensor([np.nextafter(end, np.inf)], dtype=v.dtype)])
        smaller = (near & (scores[None] < scores[:, None])).sum(dim=1)
        share = smaller.double() / near.sum(dim=1)
        if sum(ratio[i] for i in range(n) if share[i] < share[n]) >= wanted:
            return end
    return float("inf")


@pytest.mark.long
@pytest.mark.parametrize("own", [0.0, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("kernel", ["box", "nearest"])
def test_the_level_with_ratios_is_what_trying_every_score_finds(kernel: str, own: float) -> None:
    for seed in range(6):
        near, x, v, w = ready(WeightedLocal(Weighted("given"), localizer(kernel)), seed)
        new = normal(5, 2, seed=100 + seed)
        notes = {"embedding": new, "ratio.weight": torch.full((5,), own).double()}
        found = near.threshold(0.2, notes)[:, 0].tolist()
        assert found == [by_hand(kernel, x, v, w, one, own, "0.2") for one in new]


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("guarantee", ["level", "random"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_ratios_change_no_band(kernel: str, guarantee: str) -> None:
    if kernel == "nearest" and guarantee == "random":
        pytest.skip("nearest neighbours are no density")
    x, y, model = normal(150, 4, seed=0), normal(150, seed=1), small_mlp()
    plain = ffcp.LCP(model, localizer(kernel, 3.0), guarantee=guarantee, seed=0)
    equal = ffcp.LCP(
        model,
        localizer(kernel, 3.0),
        guarantee=guarantee,
        seed=0,
        calibration=Weighted(lambda x: torch.full((len(x),), 3.0)),
    )
    bands = [
        p.calibrate(x[:100], y[:100]).predict_interval(x[100:], 0.2, first_row=0)
        for p in (plain, equal)
    ]
    if guarantee == "level":
        assert torch.equal(bands[0].upper, bands[1].upper)
    else:  # rounded down, and what that took is given to the new point
        assert bool((bands[1].upper >= bands[0].upper).all())
        assert float((bands[1].upper == bands[0].upper).double().mean()) > 0.9


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize(
    ("kernel", "guarantee"),
    [("nearest", "level"), ("gaussian", "level"), ("gaussian", "random"), ("box", "random")],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_true_ratio_covers_where_localizing_alone_does_not(
    kernel: str, guarantee: str, grouped: bool
) -> None:
    neighbours = 8 if grouped else 60
    near = Localizer(kernel, on="input", bandwidth=neighbours if kernel == "nearest" else 1.5)

    def make(calibration: Any) -> Any:
        return lambda: ffcp.LCP(Zero(), near, guarantee=guarantee, calibration=calibration, seed=0)

    assert too_low(coverages(make(Weighted(true_ratio)), False, grouped)) > ERROR_RATE
    if not grouped and guarantee == "level":
        assert too_low(coverages(make(None), False)) < ERROR_RATE


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("method", [ffcp.LCP, ffcp.LCQR, ffcp.FFLCP, ffcp.FFLCQR])
def test_ratio_and_bandwidth_are_found_and_come_back_from_a_file(
    method: Any, tmp_path: Any
) -> None:
    x, y, new = normal(400, 4, seed=0), normal(400, seed=1), normal(200, 4, seed=2) + 0.3
    model = small_mlp(outputs=2 if "Q" in method.__name__ else 1)
    where = ("0",) if "FF" in method.__name__ else ()
    learns = method(model, *where, calibration=Weighted("learn"), seed=0)
    learns.calibrate(x, y, new=new, groups=["a", "b"] * 200)
    assert {"shift", "bandwidth"} <= set(learns._choices)
    groups = ["a"] * 20
    band = learns.predict_interval(x[:20], 0.2, groups=groups)
    learns.save(tmp_path / "one")
    again = ffcp.load(tmp_path / "one", model)
    assert torch.equal(again.predict_interval(x[:20], 0.2, groups=groups).upper, band.upper)
    assert again._choices.keys() == learns._choices.keys()
    learns.calibrate(x, y, groups=["a", "b"] * 200, update=True)
    assert len(learns.calibration) == len(again.calibration) + 400


def test_label_sets_take_ratios_and_places() -> None:
    x, y = normal(300, 4, seed=0), torch.randint(0, 4, (300,))
    near = WeightedLocal(Weighted("given"), Localizer("gaussian", on="input", bandwidth=2.0))
    sets = ffcp.LAC(small_mlp(outputs=4), calibration=near)
    sets.calibrate(x, y, weights=torch.ones(300))
    assert sets.predict_set(x[:10], 0.2, weights=torch.ones(10)).mask.shape == (10, 4)


def test_many_calibration_points_have_their_level_set_by_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ffcp.conformal.local.LEVEL_ROWS", 30)
    near, *_ = ready(WeightedLocal(Weighted("given"), localizer("gaussian")))
    notes = {"embedding": normal(5, 2, seed=9), "ratio.weight": torch.ones(5).double()}
    assert near.threshold(0.2, notes).isfinite().any()


def test_what_has_no_proof_or_no_sense_is_refused() -> None:
    model = small_mlp()
    with pytest.raises(ValueError, match="use guarantee='level' or 'random'"):
        ffcp.LCP(model, guarantee="none", calibration=Weighted("given"))
    with pytest.raises(TypeError, match="as its calibration"):
        ffcp.LCP(model, calibration=ffcp.Marginal())  # type: ignore[arg-type]
    learns = ffcp.LCP(model, calibration=Weighted("learn"))
    with pytest.raises(ValueError, match="pass calibrate"):
        learns.fit_localizer(normal(90, 4, seed=0), normal(90, seed=1))


@pytest.mark.parametrize("guarantee", ["level", "random"])
def test_infinite_bands_say_why(guarantee: str) -> None:
    x, y = normal(100, 4, seed=0), normal(100, seed=1)
    far = ffcp.LCP(
        small_mlp(),
        Localizer("gaussian", on="input", bandwidth=1.0),
        guarantee=guarantee,
        calibration=Weighted(lambda x: (5 * x[:, 0]).exp()),
    ).calibrate(x, y)
    with pytest.warns(ffcp.FFCPWarning, match="effective sample size"):
        band = far.predict_interval(torch.full((3, 4), 4.0))
    assert band.upper.isinf().all()


@pytest.mark.parametrize("calibration", [ffcp.LabelShift([1.0] * 9), ffcp.ByLabel()])
def test_bands_refuse_calibrations_that_look_at_classes(calibration: Any) -> None:
    for one in (calibration, ffcp.Mondrian(calibration)):
        with pytest.raises(ValueError, match="a band has none: it is for label sets"):
            ffcp.CP(small_mlp(), calibration=one)


def test_localized_ratios_are_not_exported(tmp_path: Any) -> None:
    x, y = normal(100, 4, seed=0), normal(100, seed=1)
    near = ffcp.LCP(small_mlp(), localizer("nearest"), calibration=Weighted(true_ratio))
    with pytest.raises(ValueError, match="thresholds of WeightedLocal have no graph"):
        near.calibrate(x, y).export(tmp_path / "one.onnx", x)
