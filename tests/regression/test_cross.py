"""Bands from networks trained on folds: what the theorems promise, and what they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp


def least_squares(x: Tensor, y: Tensor) -> nn.Module:
    model = nn.Linear(x.shape[1], 1, bias=False).double()
    model.weight.data = torch.linalg.lstsq(x, y[:, None], driver="gelsd").solution.T
    return model


def nearest_mean(x: Tensor, y: Tensor) -> nn.Module:
    """A training that is unstable on purpose: it returns one of its targets."""

    class One(nn.Module):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.register_buffer("value", value)

        def forward(self, x: Tensor) -> Tensor:
            return self.value.expand(len(x), 1) + 0 * x[:, :1]

    return One(y[y.abs().argmax()])


def crossed(
    x: Tensor,
    y: Tensor,
    folds: Tensor,
    train: Callable[..., nn.Module] = least_squares,
    side: str = "both",
) -> ffcp.CrossConformal:
    models = [train(x[folds != k], y[folds != k]) for k in range(int(folds.max()) + 1)]
    return ffcp.CrossConformal(models, folds, side=side).calibrate(x, y)


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1) + torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("folds", [5, 10, 20])
def test_the_band_is_that_of_the_definition(folds: int) -> None:
    x, y = draw(20, 0)
    number = torch.arange(20) % folds
    predictor = crossed(x, y, number)
    new, _ = draw(4, 1)
    band = predictor.predict_interval(new, alpha=0.2)
    for row in range(4):
        low, high = [], []
        for i in range(20):
            model = predictor.models[int(number[i])].requires_grad_(False)
            error = abs(float(y[i] - model(x[i : i + 1])))
            centre = float(model(new[row : row + 1]))
            low.append(centre - error)
            high.append(centre + error)
        # floor(0.2 * 21) = 4 and ceil(0.8 * 21) = 17
        assert float(band.lower[row]) == pytest.approx(sorted(low)[3], abs=1e-12)
        assert float(band.upper[row]) == pytest.approx(sorted(high)[16], abs=1e-12)
        assert band.lower[row] <= band.prediction[row] <= band.upper[row]


@pytest.mark.parametrize(
    ("rows", "folds", "promised"),
    [
        (30, 30, 0.8),  # the jackknife+: Theorem 1
        (30, 10, 0.8 - (1 - 10 / 30) / 11),  # the second term is the smaller one
        (100, 2, 0.8 - 2 * (1 - 1 / 2) / (100 / 2 + 1)),  # the first one is
        (31, 10, 0.8 - 2 * 9 / 41),  # folds of two sizes: only the first is known
    ],
)
def test_the_guarantee_has_the_constants_of_the_theorem(
    rows: int, folds: int, promised: float
) -> None:
    models = [nn.Linear(1, 1) for _ in range(folds)]
    predictor = ffcp.CrossConformal(models, torch.arange(rows) % folds)
    assert predictor.guarantee(0.1) == pytest.approx(promised, abs=1e-12)


def promised(folds: Tensor, alpha: float = 0.1) -> float:
    models = [nn.Linear(1, 1) for _ in range(int(folds.max()) + 1)]
    return ffcp.CrossConformal(models, folds).guarantee(alpha)


def test_even_folds_promise_as_much_for_every_number_of_rows() -> None:
    for rows in range(20, 401):
        folds = ffcp.CrossConformal.even_folds(rows)
        left_out = int((folds < 0).sum())
        sizes = torch.bincount(folds[folds >= 0])
        assert len(sizes.unique()) == 1
        assert left_out <= rows / 10
        assert len(sizes) <= 15 or rows <= 30
        even = torch.arange(rows // 10 * 10) % 10  # the nearest number that ten folds divide
        assert promised(folds) >= promised(even) - 0.02


def test_fewer_than_two_rows_have_no_folds() -> None:
    with pytest.raises(ValueError, match="rows"):
        ffcp.CrossConformal.even_folds(1)


def test_rows_in_no_fold_calibrate_nothing(tmp_path: Path) -> None:
    x, y = draw(43, 0)
    folds = ffcp.CrossConformal.even_folds(43, seed=3)
    inside = folds >= 0
    predictor = crossed(x, y, folds)
    assert len(predictor.scores) == int(inside.sum()) == 42
    same = ffcp.CrossConformal(list(predictor.models), folds[inside]).calibrate(
        x[inside], y[inside]
    )
    new, _ = draw(5, 1)
    assert torch.equal(same.predict_interval(new).upper, predictor.predict_interval(new).upper)
    assert same.guarantee() == predictor.guarantee()
    predictor.save(tmp_path / "c.safetensors")
    again = ffcp.CrossConformal.load(tmp_path / "c.safetensors", list(predictor.models))
    assert torch.equal(again.predict_interval(new).lower, predictor.predict_interval(new).lower)
    assert again.guarantee() == predictor.guarantee()
    assert "42" in repr(again)


@pytest.mark.heavy
@pytest.mark.parametrize("train", [least_squares, nearest_mean])
@pytest.mark.parametrize("rows", [37, 47])
def test_coverage_holds_where_rows_are_left_out_of_folds(
    rows: int, train: Callable[..., nn.Module]
) -> None:
    hits, tables = 0, 400
    for seed in range(tables):
        x, y = draw(rows + 1, seed)
        folds = ffcp.CrossConformal.even_folds(rows, seed)
        assert bool((folds < 0).any())
        band = crossed(x[:rows], y[:rows], folds, train).predict_interval(x[rows:], alpha=0.2)
        hits += int(band.lower <= y[rows] <= band.upper)
    least = promised(folds, 0.2)
    assert hits / tables > least - 3.1 * math.sqrt(least * (1 - least) / tables)
    if train is least_squares:
        assert hits / tables > 0.8 - 3.1 * math.sqrt(0.16 / tables)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("train", "folds", "side"),
    [
        (least_squares, 4, "both"),
        (least_squares, 12, "both"),
        (nearest_mean, 4, "both"),
        (nearest_mean, 12, "both"),
        (least_squares, 4, "upper"),
    ],
)
def test_coverage_is_at_least_what_is_promised(
    train: Callable[..., nn.Module], folds: int, side: str
) -> None:
    # 100 tables of 12 rows, one new row each: fewer hits than z = 3.1 standard deviations below
    # the promise happen once in a thousand.
    hits, tables = 0, 100
    for seed in range(tables):
        x, y = draw(13, 1000 + seed)
        band = crossed(x[:12], y[:12], torch.arange(12) % folds, train, side).predict_interval(
            x[12:], alpha=0.2
        )
        hits += int(band.lower[0] <= y[12] <= band.upper[0])
    promised = ffcp.CrossConformal([nn.Linear(3, 1)] * folds, torch.arange(12) % folds).guarantee(
        0.2
    )
    assert hits / tables > promised - 3.1 * math.sqrt(promised * (1 - promised) / tables)
    if train is least_squares and side == "both":  # a steady training is covered as usual
        assert hits / tables > 0.8 - 3.1 * math.sqrt(0.16 / tables)


def test_with_too_few_rows_the_band_is_infinite_and_says_so() -> None:
    x, y = draw(8, 0)
    predictor = crossed(x, y, torch.arange(8))
    with pytest.warns(ffcp.FFCPWarning, match="9"):
        band = predictor.predict_interval(x[:2], alpha=0.1)
    assert torch.isinf(band.lower).all()
    assert torch.isinf(band.upper).all()


def test_one_side_is_infinite_on_the_other() -> None:
    x, y = draw(40, 0)
    band = crossed(x, y, torch.arange(40) % 4, side="upper").predict_interval(x[:3])
    assert torch.isinf(band.lower).all()
    assert torch.isfinite(band.upper).all()


def test_a_saved_file_is_read_again_and_belongs_to_its_networks(tmp_path: Path) -> None:
    x, y = draw(40, 0)
    predictor = crossed(x, y, torch.arange(40) % 4)
    predictor.save(tmp_path / "cross.safetensors")
    again = ffcp.CrossConformal.load(tmp_path / "cross.safetensors", list(predictor.models))
    assert torch.equal(again.predict_interval(x).upper, predictor.predict_interval(x).upper)
    others = [nn.Linear(3, 1, bias=False).double() for _ in range(4)]
    with pytest.raises(ffcp.CalibrationFileError, match="networks"):
        ffcp.CrossConformal.load(tmp_path / "cross.safetensors", others)
    data = bytearray((tmp_path / "cross.safetensors").read_bytes())
    data[-20] ^= 1
    (tmp_path / "cross.safetensors").write_bytes(data)
    with pytest.raises(ffcp.CalibrationFileError):
        ffcp.CrossConformal.load(tmp_path / "cross.safetensors", list(predictor.models))


def test_changed_weights_are_noticed() -> None:
    x, y = draw(40, 0)
    predictor = crossed(x, y, torch.arange(40) % 4)
    with torch.no_grad():
        next(predictor.models[2].parameters()).add_(1)
    with pytest.raises(RuntimeError, match="weights"):
        predictor.predict_interval(x)


@pytest.mark.parametrize(
    ("folds", "message"),
    [([0, 1, 3], "3"), ([0.5, 1, 2], "folds"), ([0, 0, 1], "folds")],
)
def test_folds_that_do_not_fit_the_models_are_refused(folds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.CrossConformal([nn.Linear(1, 1)] * 3, np.array(folds))


def test_rows_in_another_number_are_refused() -> None:
    predictor = ffcp.CrossConformal([nn.Linear(1, 1)] * 2, [0, 1, 0, 1])
    with pytest.raises(ValueError, match="folds"):
        predictor.calibrate(torch.zeros(3, 1), torch.zeros(3))


def test_what_are_no_models_or_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="left"):
        ffcp.CrossConformal([nn.Linear(1, 1)] * 2, [0, 1], side="left")
    with pytest.raises(ValueError, match="models"):
        ffcp.CrossConformal([nn.Linear(1, 1)], [0])
    with pytest.raises(TypeError, match="int"):
        ffcp.CrossConformal([nn.Linear(1, 1), 3], [0, 1])
    two = ffcp.CrossConformal([nn.Linear(3, 2), nn.Linear(3, 2)], [0, 1] * 10)
    with pytest.raises(ValueError, match="output"):
        two.calibrate(torch.randn(20, 3), torch.randn(20))
    with pytest.raises(RuntimeError, match="calibrate"):
        two.predict_interval(torch.randn(2, 3))
    assert "20" in repr(two)


def test_calling_it_gives_bands() -> None:
    x, y = draw(20, 0)
    predictor = crossed(x, y, torch.arange(20) % 5)
    assert predictor(x, 0.2).upper.equal(predictor.predict_interval(x, 0.2).upper)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    x, y = draw(20, 0)
    model = nn.Linear(3, 1).double()
    ffcp.CP(model).calibrate(x, y).save(tmp_path / "file")
    with pytest.raises(ffcp.CalibrationFileError, match="CrossConformal"):
        ffcp.CrossConformal.load(tmp_path / "file", [model, model])


def test_columns_of_a_frame_are_put_in_the_order_of_the_calibration(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = draw(20, 0)
    frame = pandas.DataFrame(x.numpy(), columns=["a", "b", "c"])
    number = torch.arange(20) % 5
    models = [least_squares(x[number != k], y[number != k]) for k in range(5)]
    predictor = ffcp.CrossConformal(models, number).calibrate(frame, y)
    expected = predictor.predict_interval(frame)
    predictor.save(tmp_path / "cross")
    for one in (predictor, ffcp.CrossConformal.load(tmp_path / "cross", models)):
        assert one.predict_interval(frame[["c", "a", "b"]]).upper.equal(expected.upper)
        with pytest.raises(ValueError, match="'d'"):
            one.predict_interval(frame.rename(columns={"b": "d"}))


def test_intervals_know_their_level() -> None:
    x, y = draw(40, 0)
    interval = crossed(x, y, torch.arange(40) % 5).predict_interval(x, 0.2)
    assert interval.alpha == 0.2
    score = ffcp.metrics.interval_score(interval, y)
    assert score == ffcp.metrics.interval_score(interval, y, 0.2)


@pytest.mark.parametrize("seed", range(20))
def test_a_target_whose_score_ties_is_not_lost_by_rounding(seed: int) -> None:
    """Rows that repeat have one score; an interval of it contains their target."""
    x, y = (column.repeat(5, *[1] * (column.dim() - 1)) for column in draw(1, seed))
    model = nn.Linear(3, 1).double()
    predictor = ffcp.CrossConformal([model] * 5, torch.arange(5)).calibrate(x, y)
    assert bool(predictor.predict_interval(x, 0.4).contains(y).all())
