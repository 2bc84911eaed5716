"""Joint ellipsoids: their law, their geometry, what they learn and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf
from torch import Tensor, nn

import ffcp
from ffcp.regression.ellipsoid import Ellipsoid, shrunk_covariance
from tests.law import ERROR_RATE, draw_hits, p_value, upper_p_value

ALPHA = 0.1


def network(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, outputs))


def errors(rows: int, outputs: int, correlation: float, generator: torch.Generator) -> Tensor:
    matrix = torch.full((outputs, outputs), correlation) + (1 - correlation) * torch.eye(outputs)
    return torch.randn(rows, outputs, generator=generator) @ torch.linalg.cholesky(matrix).T


def rows(n: int, outputs: int = 2, correlation: float = 0.8, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=generator)
    units = 10.0 ** torch.arange(outputs)
    with torch.no_grad():
        return x, network(outputs)(x) + units * errors(n, outputs, correlation, generator)


# -- what is promised -----------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("make", [ffcp.CP, lambda model, **ways: ffcp.FFCP(model, "0", **ways)])
def test_coverage_follows_the_law_of_split_conformal_prediction(
    make: Any, one_by_one: bool
) -> None:
    n, t = 60, 10
    x, y = rows(300, seed=9)
    predictor = make(network(), joint="ellipsoid").fit(x, y)
    inner = network()

    def sample(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 3, generator=generator)
        with torch.no_grad():
            return x, inner(x) + errors(count, 2, 0.8, generator)

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor.calibrate(x_cal, y_cal)
        parts = zip(x.split(1 if one_by_one else t), y.split(1 if one_by_one else t), strict=True)
        return torch.cat([predictor.predict_interval(a, ALPHA).contains(b) for a, b in parts])

    hits = draw_hits(sample, covered, n=n, t=t, repeats=400)
    assert p_value(hits, t, n, ffcp.conformal_rank(n, ALPHA)) > ERROR_RATE


@pytest.mark.heavy
def test_rows_set_aside_for_the_covariance_do_not_calibrate() -> None:
    n, t = 80, 10
    predictor = ffcp.CP(network(), joint="ellipsoid")
    inner = network()

    def sample(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 3, generator=generator)
        with torch.no_grad():
            return x, inner(x) + errors(count, 2, 0.8, generator)

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor.calibrate(x_cal, y_cal)
        return predictor.predict_interval(x, ALPHA).contains(y)

    hits = draw_hits(sample, covered, n=n, t=t, repeats=400)
    left = len(predictor.calibration)
    assert left == 64
    assert p_value(hits, t, left, ffcp.conformal_rank(left, ALPHA)) > ERROR_RATE


@pytest.mark.heavy
def test_complete_rows_calibrate_and_known_outputs_are_covered_by_the_projection() -> None:
    n, t, outputs = 90, 10, 3
    x, y = rows(300, outputs, seed=9)
    predictor = ffcp.CP(network(outputs), joint="ellipsoid", missing=True).fit(x, y)
    inner = network(outputs)

    def sample(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 3, generator=generator)
        with torch.no_grad():
            y = inner(x) + errors(count, outputs, 0.8, generator)
        lost = torch.rand(count, generator=generator) < 0.4
        y[lost, 2] = torch.nan
        return x, y

    fewest = []

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor.calibrate(x_cal, y_cal)
        fewest.append(int((~predictor.calibration.scores.isnan()).sum()))
        return predictor.predict_interval(x, ALPHA).contains(y)

    hits = draw_hits(sample, covered, n=n, t=t, repeats=300)
    assert max(fewest) < n
    assert upper_p_value(hits, t, 54, ffcp.conformal_rank(54, ALPHA)) > ERROR_RATE


@pytest.mark.parametrize("correlation", [0.8, 0.999])
def test_rows_at_the_edge_are_inside_and_rows_beyond_are_not(correlation: float) -> None:
    # The first output is so large beside its errors that ends in float32 would move by more than
    # the ellipsoid is thick.
    model = network()
    model[2].bias.data[0] += 1e7
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(1100, 3, generator=generator)
        with torch.no_grad():
            y = model(x).double() + errors(1100, 2, correlation, generator)
        predictor = ffcp.CP(model, joint="ellipsoid").fit(x[100:], y[100:])
        predictor.calibrate(x[:60], y[:60])
        held = predictor.predict_interval(x[:60], ALPHA).contains(y[:60])
        assert int(held.sum()) == ffcp.conformal_rank(60, ALPHA)  # ties have probability 0
        threshold = float(predictor.calibration.quantile(ALPHA))
        inside = predictor.score(x[60:100], y[60:100]) <= threshold
        found = predictor.predict_interval(x[60:100], ALPHA).contains(y[60:100])
        assert found.tolist() == inside.tolist()


# -- geometry -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "correlation", "ratio"), [(2, 0.5, 0.85), (4, 0.5, 0.48), (4, 0.9, 0.08)]
)
def test_volume_beside_that_of_the_box(outputs: int, correlation: float, ratio: float) -> None:
    x, y = rows(40_000, outputs, correlation)
    model = network(outputs)
    ellipsoid, box = (
        ffcp.CP(model, joint=joint).calibrate(x, y).predict_interval(x[:1], ALPHA)
        for joint in ("ellipsoid", True)
    )
    assert float(ellipsoid.volume / box.width.prod()) == pytest.approx(ratio, abs=0.015)


@pytest.mark.parametrize("make", [ffcp.CP, lambda model, **ways: ffcp.FFCP(model, "0", **ways)])
def test_inside_is_where_the_score_is_at_most_the_threshold(make: Any) -> None:
    x, y = rows(600, 3)
    predictor = make(network(3), joint="ellipsoid").calibrate(x[:300], y[:300])
    found = predictor.predict_interval(x[300:], [0.1, 0.4])
    threshold = predictor.calibration.quantiles([0.1, 0.4], {})[:, 0]
    expected = predictor.score(x[300:], y[300:]) <= threshold
    assert found.contains(y[300:]).tolist() == expected.tolist()
    assert [one.contains(y[300:]).tolist() for one in found.levels] == expected.tolist()
    assert found.volume.shape == (2, 300)
    assert found.coverage(y[300:]) == ffcp.metrics.coverage(found, y[300:], joint=True)
    assert [float(c) for c in found.coverage(y[300:])] == pytest.approx(
        expected.double().mean(1).tolist()
    )


def test_ellipsoids_grow_with_the_scale() -> None:
    x, y = rows(600)
    model = network()
    predictor = ffcp.FFCP(model, "0", joint="ellipsoid").calibrate(x[:300], y[:300])
    width = predictor.predict_interval(x[300:]).width.float()
    norms = ffcp.gradient_norms(model, x[300:], ["0"])[1]["0"]
    torch.testing.assert_close(width / width[0], norms / norms[0], rtol=1e-3, atol=0)


def test_the_box_is_the_smallest_around_the_ellipsoid() -> None:
    correlation = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
    half = torch.tensor([[2.0, 5.0]]).double()
    found = Ellipsoid(1 - half, 1 + half, torch.ones(1, 2).double(), correlation=correlation)
    turn = torch.linspace(0, 2 * math.pi, 20_001).double()
    root = torch.linalg.cholesky(correlation)
    edge = 1 + half * (torch.stack([turn.cos(), turn.sin()], dim=1) @ root.T)
    torch.testing.assert_close(edge.amax(dim=0), found.upper[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(edge.amin(dim=0), found.lower[0], rtol=1e-6, atol=0)
    inside, outside = (found.contains(1 + s * (edge[:1] - 1)) for s in (0.999, 1.001))
    assert (bool(inside), bool(outside)) == (True, False)
    area = torch.linalg.det(correlation).sqrt() * math.pi * half.prod()
    assert float(found.volume) == pytest.approx(float(area))


def test_known_outputs_are_looked_for_in_the_projection() -> None:
    correlation = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
    ends = torch.ones(4, 2).double()
    found = Ellipsoid(-ends, ends, 0 * ends, correlation=correlation)
    nan = torch.nan
    given = [[0.9, nan], [nan, 1.1], [0.9, -0.9], [nan, nan]]
    assert found.contains(given).tolist() == [True, False, False, False]


def test_units_of_outputs_do_not_matter() -> None:
    x, y = rows(500)
    model, large = network(), network()
    large[2].weight.data[0] *= 1000
    large[2].bias.data[0] *= 1000
    units = torch.tensor([1000.0, 1.0])
    found, expected = (
        ffcp.CP(m, joint="ellipsoid").calibrate(x[:300], u * y[:300]).predict_interval(x[300:])
        for m, u in ((large, units), (model, 1))
    )
    torch.testing.assert_close(found.volume, 1000 * expected.volume, rtol=1e-4, atol=0)
    assert torch.equal(found.contains(units * y[300:]), expected.contains(y[300:]))


def test_too_few_rows_give_an_infinite_ellipsoid() -> None:
    x, y = rows(30)
    predictor = ffcp.CP(network(), joint="ellipsoid").fit(x, y).calibrate(x[:5], y[:5])
    with pytest.warns(ffcp.FFCPWarning, match="needs at least 9 calibration rows"):
        found = predictor.predict_interval(x[:2], ALPHA)
    assert found.volume.isinf().all()
    assert found.contains(y[:2]).all()


def test_one_output_is_an_interval() -> None:
    x, y = rows(300, 1)
    model = network(1)
    ellipsoid = ffcp.CP(model, joint="ellipsoid").fit(x[:100], y[:100])
    found = ellipsoid.calibrate(x[100:], y[100:, 0]).predict_interval(x[:20])
    expected = ffcp.CP(model).calibrate(x[100:], y[100:, 0]).predict_interval(x[:20])
    torch.testing.assert_close(found.upper.float(), expected.upper)
    torch.testing.assert_close(found.volume, expected.width.double())


# -- the covariance -------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "outputs"), [(15, 10), (200, 4), (12, 40)])
def test_shrinking_is_that_of_ledoit_and_wolf(n: int, outputs: int) -> None:
    found = errors(n, outputs, 0.6, torch.Generator().manual_seed(n)).double()
    unit = found / found.square().mean(dim=0).sqrt()
    expected, share = ledoit_wolf(unit.numpy(), assume_centered=True)
    assert 0 < share < 1
    spread = shrunk_covariance(found).diagonal().sqrt()
    covariance = shrunk_covariance(found) / spread / spread[:, None]
    np.testing.assert_allclose(covariance.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(spread.numpy(), found.square().mean(dim=0).sqrt().numpy())


def test_few_rows_and_equal_outputs_still_have_a_volume() -> None:
    one = torch.randn(400, 1, dtype=torch.float64)
    signs = one.sign().repeat(1, 3)
    for residuals in (one[:5].repeat(1, 3), one.repeat(1, 3), signs, torch.zeros(400, 3).double()):
        covariance = shrunk_covariance(residuals)
        assert int(torch.linalg.cholesky_ex(covariance).info) == 0


def test_the_covariance_comes_from_rows_that_do_not_calibrate() -> None:
    x, y = rows(900)
    predictor = ffcp.CP(network(), joint="ellipsoid").fit(x[:300], y[:300])
    predictor.calibrate(x[300:], y[300:])
    learned = predictor._state.score.covariance
    predictor.calibrate(x[300:], -3 * y[300:])
    assert torch.equal(predictor._state.score.covariance, learned)
    assert len(predictor.calibration) == 600
    aside = ffcp.CP(network(), joint="ellipsoid").calibrate(x, y)
    assert len(aside.calibration) == 720
    aside.calibrate(x[:50], y[:50], update=True)
    assert len(aside.calibration) == 770


def test_the_layer_is_selected_before_the_covariance() -> None:
    x, y = rows(900)
    predictor = ffcp.FFCP(network(), joint="ellipsoid").calibrate(x, y)
    assert predictor.choice is not None
    assert predictor.feature in predictor.choice.candidates
    found = predictor.predict_interval(x[:20])
    assert found.volume.isfinite().all()
    with pytest.raises(RuntimeError, match="not selected yet"):
        ffcp.FFCP(network(), joint="ellipsoid").fit(x, y)


@pytest.mark.parametrize(
    "calibration",
    [
        ffcp.calibrations.Mondrian(by=lambda x: (x[:, 0] > 0.5).long()),
        ffcp.calibrations.Local(ffcp.kernels.Localizer("nearest", bandwidth=50)),
        ffcp.calibrations.Conditional("0"),
        ffcp.calibrations.Conditional(lambda x: x > 0.5),
    ],
)
def test_other_calibrations_take_it(calibration: Any) -> None:
    x, y = rows(1600)
    predictor = ffcp.CP(network(), joint="ellipsoid", calibration=calibration)
    predictor.fit(x[:300], y[:300]).calibrate(x[300:1000], y[300:1000])
    assert float(predictor.predict_interval(x[1000:]).coverage(y[1000:])) > 0.86


# -- saving, merging, metrics, pictures ------------------------------------------------------


@pytest.mark.parametrize("fitted", [False, True])
def test_saved_loaded_and_merged(fitted: bool, tmp_path: Path) -> None:
    x, y = rows(900)
    model = network()
    predictor = ffcp.FFCP(model, "0", joint="ellipsoid")
    if fitted:
        predictor.fit(x[:300], y[:300])
    predictor.calibrate(x[300:600], y[300:600]).save(tmp_path / "file")
    expected = predictor.predict_interval(x[600:])
    for again in (
        ffcp.load(tmp_path / "file", model),
        ffcp.FFCP(model, "0", joint="ellipsoid").load(tmp_path / "file"),
        copy.deepcopy(predictor),
    ):
        found = again.predict_interval(x[600:])
        assert torch.equal(found.volume, expected.volume)
        assert torch.equal(found.contains(y[600:]), expected.contains(y[600:]))
    found = pickle.loads(pickle.dumps(expected))
    assert torch.equal(found.volume, expected.volume)
    rows_before = len(predictor.calibration)
    predictor.merge(predictor.settled().calibrate(x[600:], y[600:]))
    assert len(predictor.calibration) == rows_before + 300
    other = ffcp.FFCP(model, "0", joint="ellipsoid").fit(x[:200], y[:200])
    with pytest.raises(ValueError, match="settings differ"):
        predictor.merge(other.calibrate(x[200:400], y[200:400]))


def test_a_covariance_of_a_file_that_cannot_be_is_refused() -> None:
    score = ffcp.CP(network(), joint="ellipsoid")._given[0]
    matrix = torch.eye(2).double()
    bad = (matrix.float(), matrix[0], matrix[:1], -matrix, matrix / 0, matrix + matrix.cumsum(0))
    for covariance in bad:
        with pytest.raises(ValueError, match="covariance"):
            score.with_state({"covariance": covariance})
    with pytest.raises(ValueError, match="other"):
        score.with_state({"covariance": matrix, "other": matrix})


def test_metrics_count_rows_and_refuse_lengths() -> None:
    x, y = rows(900)
    found = (
        ffcp.CP(network(), joint="ellipsoid").calibrate(x[:600], y[:600]).predict_interval(x[600:])
    )
    target, share = y[600:], float(found.contains(y[600:]).double().mean())
    assert float(ffcp.metrics.coverage(found, target)) == pytest.approx(share)
    groups = ffcp.metrics.group_coverage(found, target, groups=(x[600:, 0] > 0.5).numpy())
    held = found.contains(target)[x[600:, 0] > 0.5].double().mean()
    assert float(groups.groups[True]) == pytest.approx(float(held))
    lost = target.clone()
    lost[:100, 1] = torch.nan
    assert ffcp.metrics.coverage(found, lost, missing=True).rows == 200
    assert ffcp.metrics.coverage(found, lost, joint="known", missing=True).rows == 300
    for measure in (
        lambda: ffcp.metrics.mean_length(found),
        lambda: ffcp.metrics.interval_score(found, target),
    ):
        with pytest.raises(ValueError, match="ellipsoid has no lengths"):
            measure()


def test_a_monitor_counts_rows() -> None:
    x, y = rows(900)
    predictor = ffcp.CP(network(), joint="ellipsoid").calibrate(x[:600], y[:600])
    monitor = ffcp.Monitor(predictor)
    monitor.update(x[600:], y[600:])
    share = predictor.predict_interval(x[600:], monitor.alpha).contains(y[600:]).double().mean()
    assert monitor.coverage()[None][0] == pytest.approx(float(share))


def test_two_outputs_are_drawn_as_ellipses() -> None:
    pytest.importorskip("matplotlib").use("agg")
    x, y = rows(400)
    predictor = ffcp.CP(network(), joint="ellipsoid").calibrate(x[:300], y[:300])
    axes = predictor.predict_interval(x[300:], [0.1, 0.5]).plot(y=y[300:])
    assert len(axes.patches) == 24  # two levels of twelve rows
    three = rows(400, 3)
    of_three = ffcp.CP(network(3), joint="ellipsoid").calibrate(three[0][:300], three[1][:300])
    assert len(of_three.predict_interval(x[300:]).plot(y=three[1][300:])) == 3


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: ffcp.CQR(m, joint="ellipsoid"), "point prediction"),
        (lambda m: ffcp.CP(m, joint="ellipsoid", side="lower"), "needs ends"),
        (lambda m: ffcp.CP(m, joint="ellipsoid", support=(0, None)), "clips boxes"),
        (lambda m: ffcp.CP(m, joint="ellipsoid", output_scales=[1, 2]), "leave out output_scales"),
        (lambda m: ffcp.Auto(m, joint="ellipsoid"), "use CP, FFCP"),
        (lambda m: ffcp.Learned(m, joint="ellipsoid"), "use CP, FFCP"),
        (lambda m: ffcp.FCP(m, "0", joint="ellipsoid"), "use CP, FFCP"),
        (lambda m: ffcp.CP(m, joint="ellipse"), "ellipse"),
    ],
)
def test_what_has_no_ellipsoid_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(network())


def test_what_an_ellipsoid_has_not_is_refused() -> None:
    x, y = rows(100)
    predictor = ffcp.CP(network(), joint="ellipsoid").calibrate(x, y)
    with pytest.raises(ValueError, match="an ellipsoid has no order"):
        predictor.predict_distribution(x)
    lost = torch.full((100, 2), torch.nan)
    with pytest.raises(ValueError, match="rows of 2 outputs"):
        ffcp.CP(network(), joint="ellipsoid", missing=True).fit(x, lost)
    with pytest.raises(ValueError, match="no rows"):
        ffcp.CP(network(), joint="ellipsoid").fit(x[:0], y[:0])
