"""Intervals have the shape of the targets that calibrated, whatever the model's output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import metrics
from tests.conftest import normal, small_mlp

X, Y = normal(200, 4, seed=0), normal(200, seed=1)
NEW = normal(7, 4, seed=2)
FOLDS = torch.arange(200) % 2
near = ffcp.kernels.Localizer("gaussian", on="input", bandwidth=2.0)
levels = (0.2, 0.1)


class Flat(nn.Module):
    """A network whose output is (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, 0]


def two() -> nn.Module:
    return small_mlp(outputs=2)


METHODS: dict[str, Callable[[], Any]] = {
    "CP": lambda: ffcp.CP(small_mlp()),
    "of a flat model": lambda: ffcp.CP(Flat()),
    "FFCP": lambda: ffcp.FFCP(small_mlp(), "0"),
    "FCP": lambda: ffcp.FCP(small_mlp(), "3", steps=3),
    "CQR": lambda: ffcp.CQR(two()),
    "FFCQR": lambda: ffcp.FFCQR(two(), "0"),
    "FCQR": lambda: ffcp.FCQR(two(), "3", steps=3),
    "LCP": lambda: ffcp.LCP(small_mlp(), near),
    "FFLCP": lambda: ffcp.FFLCP(small_mlp(), "0", near),
    "LCQR": lambda: ffcp.LCQR(two(), near),
    "IntervalPredictor": lambda: ffcp.IntervalPredictor(
        small_mlp(), scale=lambda seen: 1 + seen.output.abs()
    ),
    "joint": lambda: ffcp.CP(small_mlp(), joint=True),
    "lower": lambda: ffcp.CP(small_mlp(), side="lower"),
    "each": lambda: ffcp.CP(small_mlp(), side="each"),
    "support": lambda: ffcp.CP(small_mlp(), support=(-9, None)),
}  # fmt: skip
LEARNING: dict[str, Callable[[], Any]] = {
    "Learned": lambda: ffcp.Learned(small_mlp(), seed=0),
    "Auto": lambda: ffcp.Auto(small_mlp(), seed=0),
    "FFCP, auto": lambda: ffcp.FFCP(small_mlp(), seed=0),
}
AS: dict[str, Callable[[Tensor], Tensor]] = {"(n,)": lambda y: y, "(n, 1)": lambda y: y[:, None]}


def has_shape_of(band: ffcp.Interval, y: Tensor, count: int | None = None) -> None:
    """Check all that an interval gives, of one level or of several."""
    shape = y.shape if count is None else (count, *y.shape)
    assert band.prediction.shape == y.shape
    for part in (band.lower, band.upper, band.width, band.contains(y), *band.clip(-1, 1)[:2]):
        assert part.shape == shape


def check(predictor: Any, like: Callable[[Tensor], Tensor]) -> None:
    y = like(Y[:7])
    has_shape_of(predictor.predict_interval(NEW), y)
    has_shape_of(predictor(NEW[:1]), y[:1])
    has_shape_of(predictor.predict_interval(NEW, levels), y, 2)


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("like", AS.values(), ids=AS)
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_every_method_gives_intervals_in_the_shape_of_its_targets(
    make: Callable[[], Any], like: Callable[[Tensor], Tensor]
) -> None:
    check(make().calibrate(X, like(Y)), like)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("like", AS.values(), ids=AS)
@pytest.mark.parametrize("make", LEARNING.values(), ids=LEARNING)
def test_so_does_every_method_that_learns_or_chooses(
    make: Callable[[], Any], like: Callable[[Tensor], Tensor]
) -> None:
    check(make().calibrate(X, like(Y)), like)


@pytest.mark.parametrize("like", AS.values(), ids=AS)
def test_scores_and_distributions_have_the_shape_of_targets(
    like: Callable[[Tensor], Tensor],
) -> None:
    predictor, y = ffcp.FFCP(small_mlp(), "0").calibrate(X, like(Y)), like(Y[:7])
    system = predictor.predict_distribution(NEW)
    parts = [predictor.score(NEW, y), system.prediction, system.quantile(0.3), system.cdf(y)]
    parts += [system.p_value(y), system.crps(y), system.sample(3)[0], system.quantile((0.3,))[0]]
    assert {tuple(part.shape) for part in parts} == {tuple(y.shape)}
    assert system.cdf(torch.stack([y, y])).shape == (2, *y.shape)
    sides = ffcp.FFCP(small_mlp(), "0", side="each").calibrate(X, like(Y))
    assert sides.score(NEW, y).shape == (*y.shape, 2)


def test_several_outputs_keep_their_shape() -> None:
    predictor = ffcp.CP(two()).calibrate(X, normal(200, 2, seed=3))
    has_shape_of(predictor.predict_interval(NEW), normal(7, 2, seed=3))
    has_shape_of(predictor.predict_interval(NEW, levels), normal(7, 2, seed=3), 2)


@pytest.mark.parametrize("like", AS.values(), ids=AS)
def test_the_shape_lives_on_in_files_copies_merges_updates_and_summaries(
    like: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    model = small_mlp()
    predictor = ffcp.CP(model).calibrate(X[:100], like(Y[:100]))
    predictor.save(tmp_path / "cp.safetensors")
    check(ffcp.load(tmp_path / "cp.safetensors", model), like)
    check(copy.deepcopy(predictor), like)
    again = ffcp.CP(model)
    again.load_state_dict(predictor.state_dict())
    check(again, like)
    check(ffcp.CP(model).merge(predictor), like)
    # Who has a shape keeps it.
    other = next(shape for shape in AS.values() if shape is not like)
    predictor.merge(ffcp.CP(model).calibrate(X[100:150], other(Y[100:150])))
    check(predictor.calibrate(X[150:], other(Y[150:]), update=True), like)
    check(predictor.compress(0.1), like)
    check(predictor.calibrate(X, like(Y), rank_error=0.1), like)
    loader = [(X[:100], like(Y[:100])), (X[100:], other(Y[100:]))]
    check(predictor.calibrate(loader), like)
    # A new calibration has a shape of its own.
    check(predictor.calibrate(X, other(Y)), other)


@pytest.mark.parametrize("method", ["aci", "dtaci", "pid", "plain"])
@pytest.mark.parametrize("like", AS.values(), ids=AS)
def test_a_stream_gives_the_shape_of_the_targets(
    method: str, like: Callable[[Tensor], Tensor]
) -> None:
    online = ffcp.Online(ffcp.CP(small_mlp()).calibrate(X, like(Y)), method)
    has_shape_of(online.predict_interval(NEW), like(Y[:7]))
    online.update(NEW, like(Y[:7]))
    aci = ffcp.Online(ffcp.CP(small_mlp()).calibrate(X, like(Y)), gamma=5.0)
    for row in range(7):  # of which some are infinite, and some the prediction alone
        has_shape_of(aci.predict_interval(NEW[row : row + 1]), like(Y[row : row + 1]))
        aci.update(NEW[row : row + 1], like(Y[row : row + 1]))


@pytest.mark.parametrize("like", AS.values(), ids=AS)
def test_folds_give_the_shape_of_the_targets(
    like: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    models = [small_mlp(), small_mlp()]
    predictor = ffcp.CrossConformal(models, FOLDS).calibrate(X, like(Y))
    has_shape_of(predictor.predict_interval(NEW), like(Y[:7]))
    predictor.save(tmp_path / "folds.safetensors")
    loaded = ffcp.CrossConformal.load(tmp_path / "folds.safetensors", models)
    has_shape_of(loaded.predict_interval(NEW), like(Y[:7]))


@pytest.mark.parametrize("like", AS.values(), ids=AS)
@pytest.mark.parametrize("given", AS.values(), ids=AS)
def test_stored_predictions_give_the_shape_of_the_targets(
    given: Callable[[Tensor], Tensor], like: Callable[[Tensor], Tensor]
) -> None:
    made = ffcp.CP(ffcp.Stored()).calibrate(given(X[:, 0]), like(Y))
    has_shape_of(made.predict_interval(given(NEW[:, 0])), like(Y[:7]))
    arrays = (given(X[:, 0]).double().numpy(), like(Y).double().numpy(), given(NEW[:, 0]))
    band = ffcp.intervals_from(*arrays[:2], arrays[2].double().numpy())
    has_shape_of(band, like(Y[:7]))
    pairs = np.stack([X[:, 0] - 1, X[:, 0] + 1], axis=1).astype(np.float64)
    band = ffcp.intervals_from(pairs, arrays[1], pairs[:7], quantiles=True)
    has_shape_of(band, like(Y[:7]))


def test_comparing_ends_with_targets_by_hand_counts_rows_and_no_more() -> None:
    band = ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(X, 0.1)
    inside = (band.lower <= Y) & (band.upper >= Y)
    assert inside.shape == (200,)
    assert 0.9 <= float(inside.float().mean()) < 0.93


def test_what_would_be_spread_over_rows_is_refused() -> None:
    flat = ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(NEW)
    assert torch.equal(flat.contains(Y[:7, None]), flat.contains(Y[:7]))
    for wrong in (Y[:1], Y[None, :7], Y[:6], torch.tensor(1.0), Y[:14].view(7, 2)):
        with pytest.raises(ValueError, match="shape"):
            flat.contains(wrong)
    odd = ffcp.Interval(flat.lower[:, None], flat.upper[:, None], flat.prediction)
    with pytest.raises(ValueError, match="shape"):
        odd.contains(Y[:7])


@pytest.mark.parametrize("like", AS.values(), ids=AS)
@pytest.mark.parametrize("given", AS.values(), ids=AS)
def test_metrics_never_spread_targets_over_rows(
    given: Callable[[Tensor], Tensor], like: Callable[[Tensor], Tensor]
) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, like(Y))
    band, plain = predictor.predict_interval(X), ffcp.CP(small_mlp()).calibrate(X, Y)(X)
    several, system = predictor.predict_interval(X, levels), predictor.predict_distribution(X)
    measured = [metrics.coverage, metrics.interval_score]
    for measure in measured:
        assert measure(band, given(Y)) == measure(plain, Y)
        assert measure(several, given(Y))[1] == measure(plain, Y)
    assert metrics.coverage(band, given(Y), joint=True) == metrics.coverage(plain, Y)
    middle = metrics.pinball_loss(band.prediction, given(Y), 0.5)
    assert middle == metrics.pinball_loss(plain.prediction, Y, 0.5)
    single = ffcp.CP(small_mlp()).calibrate(X, Y).predict_distribution(X)
    assert metrics.crps(system, given(Y)) == pytest.approx(metrics.crps(single, Y))
    with pytest.raises(ValueError, match="shape"):
        metrics.coverage(band, Y[None])
