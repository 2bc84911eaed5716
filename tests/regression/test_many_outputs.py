"""Several outputs: each on its own, all at once, a share of them; and targets that are missing.

The laws are tested over many calibration sets with fixed seeds, see :mod:`tests.law`.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import conformal_rank, metrics
from ffcp.scales import Sketch, Smooth
from tests.conftest import normal, small_mlp
from tests.core import threshold
from tests.law import ERROR_RATE, draw_hits, p_value, upper_p_value

N, T, ALPHA, REPEATS, OUTPUTS = 40, 30, 0.1, 450, 3


def three_targets(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Outputs that depend on each other, of very different sizes."""
    x = torch.randn(rows, 4, generator=generator)
    noise = torch.randn(rows, 3, generator=generator) + torch.randn(rows, 1, generator=generator)
    return x, noise * torch.tensor([0.1, 1.0, 10.0])


def leaky(outputs: int = OUTPUTS) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 6), nn.LeakyReLU(), nn.Linear(6, outputs)
    )


def inside(predictor: ffcp.CP, x: Tensor, y: Tensor) -> Tensor:
    band = predictor.predict_interval(x, alpha=ALPHA)
    return (band.lower <= y) & (y <= band.upper)


def hits_of(make, reduce, repeats: int = REPEATS) -> np.ndarray:
    """Count hits over many draws; ``reduce`` turns (t, m) hits of a draw into (t,) or (t, m)."""

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return reduce(inside(make().calibrate(x_cal, y_cal), x, y))

    return draw_hits(three_targets, covered, n=N, t=T, repeats=repeats)


METHODS = {
    "CP": lambda joint: ffcp.CP(small_mlp(outputs=3), joint=joint),
    "FFCP": lambda joint: ffcp.FFCP(small_mlp(outputs=3), "0", joint=joint),
    "FFCP, 1 probe": lambda joint: ffcp.FFCP(
        small_mlp(outputs=3), "0", method=Sketch(1), joint=joint
    ),
    "FFCP, 4 probes": lambda joint: ffcp.FFCP(
        small_mlp(outputs=3), "0", method=Sketch(4), joint=joint
    ),
    "FFCP, 32 probes": lambda joint: ffcp.FFCP(
        small_mlp(outputs=3), "0", method=Sketch(32), joint=joint
    ),
    "FFCP, smoothed": lambda joint: ffcp.FFCP(
        small_mlp(outputs=3), "0", method=Smooth(0.5, 2), joint=joint
    ),
}


def repeats_of(name: str) -> int:
    return REPEATS if name in ("CP", "FFCP") else REPEATS // 3  # the others take their time


@pytest.mark.heavy
@pytest.mark.parametrize("name", METHODS)
def test_each_output_follows_the_law(name: str) -> None:
    hits = hits_of(lambda: METHODS[name](False), lambda hit: hit, repeats_of(name))
    for output in range(OUTPUTS):
        assert p_value(hits[:, output], T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["CP", "FFCP", "FFCP, 4 probes"])
def test_the_box_follows_the_law(name: str) -> None:
    hits = hits_of(lambda: METHODS[name](True), lambda hit: hit.all(dim=1), repeats_of(name))
    assert p_value(hits, T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["CP", "FFCP"])
def test_a_share_of_the_outputs_follows_the_law(name: str) -> None:
    hits = hits_of(lambda: METHODS[name](0.6), lambda hit: hit.sum(dim=1) >= 2)  # of 3
    assert p_value(hits, T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["CP", "FFCP"])
def test_bonferroni_follows_the_law_of_each_output_at_a_third_of_alpha(name: str) -> None:
    hits = hits_of(lambda: METHODS[name]("bonferroni"), lambda hit: hit)
    rank = conformal_rank(N, ALPHA / OUTPUTS)
    assert rank <= N
    for output in range(OUTPUTS):
        assert p_value(hits[:, output], T, N, rank) > ERROR_RATE


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["CP", "FFCP"])
def test_bonferroni_covers_all_outputs_at_once(name: str) -> None:
    hits = hits_of(lambda: METHODS[name]("bonferroni"), lambda hit: hit.all(dim=1))
    assert upper_p_value(hits, T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


@pytest.mark.heavy
def test_the_law_test_catches_outputs_that_are_covered_one_by_one_only() -> None:
    hits = hits_of(lambda: METHODS["CP"](False), lambda hit: hit.all(dim=1))
    assert upper_p_value(hits, T, N, conformal_rank(N, ALPHA)) < 1e-8


# -- FCP ---------------------------------------------------------------------------------------

FCP_REPEATS = 40


def fcp(joint, **settings) -> ffcp.FCP:
    return ffcp.FCP(leaky(), "0", joint=joint, **settings)


def reachable_targets(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x, y = three_targets(generator, rows)
    return x, y * torch.tensor([1.0, 0.2, 0.03])


def fcp_hits(make, reduce) -> tuple[np.ndarray, np.ndarray]:
    """Count hits of bands and of scores."""

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = make()
        alpha = ALPHA / OUTPUTS if predictor.joint == "bonferroni" else ALPHA
        with warnings.catch_warnings():
            # Some rows are not inverted; if they are many, bands are infinite.
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            predictor.calibrate(x_cal, y_cal)
            hit = reduce(inside(predictor, x, y))
        scores = predictor.score(x, y).reshape(T, -1)
        near = scores <= threshold(predictor.calibration, alpha)
        return torch.cat([hit.reshape(T, -1), near], dim=1)

    hits = draw_hits(reachable_targets, covered, n=N, t=T, repeats=FCP_REPEATS)
    width = hits.shape[1] // 2
    return hits[:, :width], hits[:, width:]


@pytest.mark.heavy
@pytest.mark.parametrize(("joint", "reduce", "alpha"), [
    (False, lambda hit: hit, ALPHA),
    (True, lambda hit: hit.all(dim=1), ALPHA),
    (0.6, lambda hit: hit.sum(dim=1) >= 2, ALPHA),
    ("bonferroni", lambda hit: hit, ALPHA / OUTPUTS),
])  # fmt: skip
def test_exact_fcp_covers_at_least_as_often_as_the_law(joint, reduce, alpha) -> None:
    bands, scores = fcp_hits(lambda: fcp(joint, invert="exact"), reduce)
    rank = conformal_rank(N, alpha)
    for column in range(bands.shape[1]):
        assert upper_p_value(bands[:, column], T, N, rank) > ERROR_RATE
        # Points that cannot be inverted tie at infinity, which only ever raises coverage.
        assert upper_p_value(scores[:, column], T, N, rank) > ERROR_RATE
    assert (bands >= scores).all()  # a point inside the ball is inside the band


@pytest.mark.heavy
def test_descent_fcp_follows_the_law_in_feature_space() -> None:
    _, scores = fcp_hits(lambda: fcp(True, steps=5), lambda hit: hit.all(dim=1))
    assert p_value(scores[:, 0], T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


X, Y = normal(80, 4, seed=1), normal(80, OUTPUTS, seed=2)


def wrapped(model: nn.Sequential, output: int) -> nn.Sequential:
    """The same network with one of its outputs."""
    last = nn.Linear(6, 1)
    last.weight.data = model[4].weight.data[output : output + 1]
    last.bias.data = model[4].bias.data[output : output + 1]
    return nn.Sequential(*model[:4], last)


@pytest.mark.parametrize("settings", [{"steps": 6}, {"invert": "exact"}])
@pytest.mark.filterwarnings("ignore:the inversion found no feature")
def test_fcp_of_each_output_is_fcp_of_a_model_with_that_output(settings) -> None:
    model = leaky()
    band = ffcp.FCP(model, "0", **settings).calibrate(X, Y).predict_interval(X[:9], alpha=0.2)
    for output in range(OUTPUTS):
        alone = ffcp.FCP(wrapped(model, output), "0", **settings).calibrate(X, Y[:, output])
        expected = alone.predict_interval(X[:9], alpha=0.2)
        torch.testing.assert_close(band.lower[:, output], expected.lower)
        torch.testing.assert_close(band.upper[:, output], expected.upper)


def test_joint_descent_moves_one_feature_for_all_outputs() -> None:
    model = leaky().eval()
    v = model[0](X).detach().requires_grad_()
    moving = v
    for _ in range(3):
        loss = (model[1:](moving) - Y).square().sum()
        (gradient,) = torch.autograd.grad(loss, moving)
        moving = (moving - 0.01 * gradient).detach().requires_grad_()
    expected = (moving - v).abs().amax(dim=1).detach().double()
    torch.testing.assert_close(ffcp.FCP(model, "0", steps=3, joint=True).score(X, Y), expected)


@pytest.mark.long
def test_fcp_chooses_its_steps_for_several_outputs() -> None:
    for joint in (False, True):
        predictor = fcp(joint).calibrate(X, Y)
        assert predictor.steps in predictor.step_coverage
        assert len(predictor.calibration) == 64  # a fifth of the rows chose
        assert 0 < predictor.feature_coverage(X, Y) <= 1


def test_fcp_refuses_a_share_without_exact_inversion() -> None:
    with pytest.raises(ValueError, match="invert"):
        fcp(0.5, steps=2)


def test_fcp_refuses_to_invert_thousands_of_outputs_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 5000))
    with pytest.raises(ValueError, match=r"\b5000\b"):
        ffcp.FCP(model, "0", steps=2).calibrate(X, torch.zeros(80, 5000))


# -- targets that are missing ------------------------------------------------------------------


def with_holes(y: Tensor, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return y.masked_fill(torch.rand(y.shape, generator=generator) < 0.3, math.nan)


MISSING = {
    "CP": lambda joint: ffcp.CP(leaky(), joint=joint, missing=True),
    "FFCP": lambda joint: ffcp.FFCP(leaky(), "0", joint=joint, missing=True),
    "FCP": lambda joint: ffcp.FCP(leaky(), "0", invert="exact", joint=joint, missing=True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISSING)
@pytest.mark.filterwarnings("ignore:the inversion found no feature")
def test_each_output_is_calibrated_on_the_rows_that_have_it(name: str) -> None:
    y = with_holes(Y)
    band = MISSING[name](False).calibrate(X, y).predict_interval(X[:9], alpha=0.2)
    for output in range(OUTPUTS):
        rows = ~y[:, output].isnan()
        whole = y[rows].masked_fill(y[rows].isnan(), 0.0)
        expected = MISSING[name](False).calibrate(X[rows], whole).predict_interval(X[:9], 0.2)
        torch.testing.assert_close(band.lower[:, output], expected.lower[:, output])
        torch.testing.assert_close(band.upper[:, output], expected.upper[:, output])


@pytest.mark.parametrize("name", ["CP", "FFCP"])
def test_the_box_is_calibrated_on_the_outputs_that_are_known(name: str) -> None:
    y = with_holes(Y)
    y[7] = math.nan  # nothing is known of this row
    each = MISSING[name](False).score(X, y)
    expected = each.nan_to_num(-math.inf).amax(dim=1)
    scale = MISSING[name](False).scale

    def box() -> ffcp.IntervalPredictor:
        return ffcp.IntervalPredictor(
            leaky(), scale=scale, joint="known", output_scales=None, missing=True
        )

    joint = box().score(X, y)
    assert bool(joint[7].isnan())
    torch.testing.assert_close(joint[joint.isfinite()], expected[expected.isfinite()])
    predictor = box().calibrate(X, y)
    rest = box().calibrate(X[torch.arange(80) != 7], y[torch.arange(80) != 7])
    assert predictor.predict_interval(X).lower.equal(rest.predict_interval(X).lower)


def test_joint_descent_ignores_targets_that_are_missing() -> None:
    y = Y.clone()
    y[:, 1] = math.nan
    two = leaky()
    two[4] = nn.Linear(6, 2)
    two[4].weight.data = leaky()[4].weight.data[[0, 2]]
    two[4].bias.data = leaky()[4].bias.data[[0, 2]]
    expected = ffcp.FCP(two, "0", steps=4, joint=True).score(X, Y[:, [0, 2]])
    scores = ffcp.FCP(leaky(), "0", steps=4, joint="known", missing=True).score(X, y)
    torch.testing.assert_close(scores, expected)


def test_missing_targets_are_an_error_unless_announced() -> None:
    y = Y.clone()
    y[3, 1] = math.nan
    with pytest.raises(ValueError, match="nan"):
        ffcp.CP(leaky()).calibrate(X, y)
    y[3, 1] = math.inf
    with pytest.raises(ValueError, match="inf"):
        ffcp.CP(leaky(), missing=True).calibrate(X, y)


def test_an_output_with_too_few_targets_has_an_infinite_band() -> None:
    y = Y.clone()
    y[:-3, 1] = math.nan
    predictor = ffcp.CP(leaky(), missing=True).calibrate(X, y)
    with pytest.warns(ffcp.FFCPWarning, match=r"\b3\b"):
        band = predictor.predict_interval(X[:2], alpha=0.1)
    assert band.upper[:, 1].isinf().all()
    assert band.upper[:, [0, 2]].isfinite().all()


def test_stored_scores_with_holes_survive_saving_and_adding(tmp_path) -> None:
    y = with_holes(Y)
    whole = ffcp.CP(leaky(), missing=True).calibrate(X, y)
    parts = ffcp.CP(leaky(), missing=True).calibrate(X[:30], y[:30])
    parts.calibrate(X[30:], y[30:], update=True)
    parts.save(tmp_path / "c.safetensors")
    again = ffcp.CP(leaky(), missing=True).load(tmp_path / "c.safetensors")
    assert again.predict_interval(X).upper.equal(whole.predict_interval(X).upper)


def test_a_calibration_by_groups_counts_the_known_scores_of_each() -> None:
    y = torch.tensor([[1.0, 4.0], [2.0, math.nan], [3.0, 5.0], [9.0, 7.0]])
    predictor = ffcp.CP(ffcp.Stored(), missing=True)
    predictor.calibrate(torch.zeros(4, 2), y, groups=["a", "a", "a", "b"])
    upper = predictor.predict_interval(torch.zeros(2, 2), 0.5, groups=["a", "b"]).upper
    assert upper.flatten().tolist() == pytest.approx([2.0, 5.0, 9.0, 7.0])


# -- the rest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [0, 2, 1.5, -0.5, "all", None])
def test_an_unknown_kind_of_joint_coverage_is_refused(joint) -> None:
    with pytest.raises(ValueError, match="joint"):
        ffcp.CP(leaky(), joint=joint)


def test_a_share_of_one_is_all() -> None:
    one, everything = (ffcp.CP(leaky(), joint=joint).calibrate(X, Y) for joint in (1.0, True))
    assert one.predict_interval(X).lower.equal(everything.predict_interval(X).lower)
    one.merge(everything)  # they have the same settings


def test_bands_grow_with_the_share() -> None:
    bands = [ffcp.CP(leaky(), joint=j).calibrate(X, Y).predict_interval(X) for j in (0.3, 0.6, 1.0)]
    lengths = [metrics.mean_length(band) for band in bands]
    assert lengths[0] < lengths[1] < lengths[2]


def test_bonferroni_is_each_output_at_a_share_of_alpha() -> None:
    together = ffcp.CP(leaky(), joint="bonferroni").calibrate(X, Y).predict_interval(X, alpha=0.3)
    alone = ffcp.CP(leaky()).calibrate(X, Y).predict_interval(X, alpha=0.1)
    assert together.lower.equal(alone.lower)


def test_the_automatic_choice_refuses_too_many_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 5000))
    with pytest.raises(ValueError, match=r"\b5000\b"):
        ffcp.FFCP(model).calibrate(X, torch.zeros(80, 5000))


def test_length_is_the_mean_over_rows_and_coordinates() -> None:
    band = ffcp.CP(leaky()).calibrate(X, Y).predict_interval(X)
    by_hand = sum((band.upper[i] - band.lower[i]).mean() for i in range(80)) / 80
    assert metrics.mean_length(band) == pytest.approx(float(by_hand))
