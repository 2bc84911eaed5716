"""Every named method gives on a dataset what it gives on one machine, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import ffcp

pytest.importorskip("ray.data")

from ffcp.ray import calibrate, engine, predict
from tests.ray.local import Rows, here

pytestmark = [
    pytest.mark.usefixtures(here.__name__),
    pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning"),
]
__all__ = ["here"]
N = 900


def network(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs)
    )


def numbers(outputs: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 4)).astype(np.float32)
    noise = (0.1 + np.abs(x[:, :1])) * rng.normal(size=(N, outputs))
    y = (x[:, :1] + noise).astype(np.float32)
    return {"x": x, "y": y[:, 0] if outputs == 1 else y, "id": np.arange(N)}


def labels(classes: int = 5) -> dict[str, Any]:
    data = numbers()
    torch.manual_seed(1)
    chances = network(classes)(torch.from_numpy(data["x"])).softmax(dim=1)
    return {**data, "y": torch.multinomial(chances, 1)[:, 0].numpy()}


SMALL = {"batch_size": 64}  # many batches, of which the last is smaller
BANDS: dict[str, Any] = {
    "CP": lambda: ffcp.CP(network(), **SMALL),
    "FFCP": lambda: ffcp.FFCP(network(), "0", **SMALL),
    "FFCP auto": lambda: ffcp.FFCP(network(), "auto", selection_fraction=0.3, **SMALL),
    "LCP": lambda: ffcp.LCP(network(), **SMALL),
    "LCP random": lambda: ffcp.LCP(
        network(), ffcp.kernels.Localizer("box", bandwidth=2.0), guarantee="random", **SMALL
    ),
    "FFLCP": lambda: ffcp.FFLCP(network(), "0", **SMALL),
    "FCP": lambda: ffcp.FCP(network(), "1", **SMALL),
    "Learned": lambda: ffcp.Learned(network(), **SMALL),
    "Auto": lambda: ffcp.Auto(network(), **SMALL),
    "function": lambda: ffcp.IntervalPredictor(
        network(), scale=lambda seen: 1 + seen.x[:, 0].abs(), **SMALL
    ),
}
TWO: dict[str, Any] = {
    "CQR": lambda: ffcp.CQR(network(2), **SMALL),
    "FFCQR": lambda: ffcp.FFCQR(network(2), "0", **SMALL),
    "LCQR": lambda: ffcp.LCQR(network(2), **SMALL),
    "FFLCQR": lambda: ffcp.FFLCQR(network(2), "0", **SMALL),
    "FCQR": lambda: ffcp.FCQR(network(2), "1", **SMALL),
}
JOINT: dict[str, Any] = {
    "each": lambda: ffcp.CP(network(3), **SMALL),
    "joint": lambda: ffcp.FFCP(network(3), "0", joint=True, **SMALL),
}
SETS: dict[str, Any] = {
    "LAC": lambda: ffcp.LAC(network(5), seed=0, **SMALL),
    "APS": lambda: ffcp.APS(network(5), seed=3, **SMALL),
    "RAPS tuned": lambda: ffcp.RAPS(network(5), tune="size", seed=0, **SMALL),
    "FFRAPS": lambda: ffcp.FFRAPS(network(5), gradient="feature", feature="0", seed=0, **SMALL),
    "by class": lambda: ffcp.LAC(network(5), class_conditional=True, seed=0, **SMALL),
    "names": lambda: ffcp.APS(network(5), seed=0, names=list("abcde"), **SMALL),
    "auto": lambda: ffcp.SetPredictor(network(5), "auto", seed=0, other_labels=True, **SMALL),
}


def same(one: Any, other: Any) -> None:
    """Hold two calibrations to be those of the same rows, whatever the batches."""
    mine, theirs = one.calibration.state(), other.calibration.state()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.allclose(tensor.double(), theirs[name].double(), atol=1e-4), name
    assert one.comparable() == other.comparable()
    assert str(getattr(one, "choice", None)) == str(getattr(other, "choice", None))
    assert one._state.set_aside == other._state.set_aside


def column(table: Any, name: str) -> torch.Tensor:
    return torch.from_numpy(np.stack(table[name].to_numpy()))


def predicted(predictor: Any, rows: Rows, **how: Any) -> Any:
    parts = predict(predictor, rows, x="x", id="id", **how).iter_batches()
    frames = [part.to_pandas() for part in parts]
    return pd.concat(frames).sort_values("id", ignore_index=True)


DRAWS = ("LCP random", "APS", "RAPS tuned", "FFRAPS", "names", "auto")  # new random numbers


@pytest.mark.heavy
@pytest.mark.parametrize("name", [*BANDS, *TWO, *JOINT])
def test_intervals_are_those_of_one_machine(name: str) -> None:
    make = {**BANDS, **TWO, **JOINT}[name]
    data = numbers(3 if name in JOINT else 1)
    one = make().calibrate(data["x"], data["y"])
    same(one, calibrate(make(), Rows.of(data, seed=1), x="x", y="y"))
    band = one.predict_interval(data["x"], [0.1, 0.3], first_row=0)
    found = predicted(one, Rows.of(data, seed=2), alphas=[0.1, 0.3])
    for level, alpha in enumerate(("0.1", "0.3")):
        for end in ("lower", "upper"):
            ends = getattr(band, end)[level].squeeze(-1)
            assert torch.allclose(column(found, f"{end}_{alpha}"), ends, atol=1e-4)
    assert torch.allclose(column(found, "prediction"), band.prediction.squeeze(-1), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", list(SETS))
def test_sets_are_those_of_one_machine(name: str) -> None:
    make, data = SETS[name], labels()
    one = make().calibrate(data["x"], data["y"])
    two = calibrate(make(), Rows.of(data, seed=1), x="x", y="y")
    assert one.comparable() == two.comparable()
    assert one.classes == two.classes
    if name not in DRAWS:
        same(one, two)
    sets = one.predict_set(data["x"], 0.1, first_row=0)
    found = predicted(one, Rows.of(data, seed=2), alphas=0.1)
    want = [row if isinstance(row, list) else row.tolist() for row in sets.labels]
    assert (
        np.mean([list(row) == own for row, own in zip(found["labels"], want, strict=True)]) > 0.99
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "FFCP auto",
        "LCP",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Learned", "Auto")),
    ],
)
def test_what_is_open_is_selected_on_the_first_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_SELECTING", 450)
    make, data = BANDS[name], numbers()
    first = make().calibrate(data["x"][:450], data["y"][:450])
    half = Rows.of(data, blocks=1).cut(450)
    monkeypatch.setattr(Rows, "cut", lambda rows, size: half)
    two = calibrate(make(), Rows.of(data), x="x", y="y")
    assert len(two.calibration) == N - first._state.set_aside
    assert two._state.set_aside == first._state.set_aside > 0
    assert two.comparable() == first.comparable()
    whole = first.merge(first.settled().calibrate(data["x"][450:], data["y"][450:]))
    same(whole, two)
    assert two.predict_interval(data["x"][:7]).lower.shape == (7,)


def test_intervals_have_the_shape_of_the_column_of_targets() -> None:
    data = numbers()
    for y in (data["y"], data["y"][:, None]):
        rows = Rows.of({**data, "y": y})
        made = calibrate(ffcp.CP(network(), **SMALL), rows, x="x", y="y")
        assert made.predict_interval(data["x"][:7]).lower.shape == y[:7].shape
        assert column(predicted(made, rows), "lower").shape == (N,)  # a column of numbers


def test_levels_are_asked_for_by_alpha_or_confidence_level() -> None:
    data = numbers()
    rows = Rows.of(data)
    made = ffcp.CP(network(), **SMALL).calibrate(data["x"], data["y"])
    one = predicted(made, rows, confidence_level=(0.9, 0.8))
    assert one.equals(predicted(made, rows, alphas=(0.1, 0.2)))
    assert {"lower_0.1", "upper_0.2"} <= set(one)
    assert predicted(made, rows, confidence_level=0.9).equals(predicted(made, rows))
    for wrong in ({"alphas": 0.1, "confidence_level": 0.9}, {"confidence": 0.9}):
        with pytest.raises(TypeError, match="alpha"):
            predict(made, rows, x="x", **wrong)


def test_groups_and_weights_come_from_columns() -> None:
    data = numbers()
    data["group"] = np.where(data["x"][:, 1] > 0, "high", "low")
    data["weight"] = 0.5 + np.abs(data["x"][:, 2])
    rows = Rows.of(data, seed=1)
    one = ffcp.CP(network(), **SMALL).calibrate(data["x"], data["y"], groups=data["group"])
    two = calibrate(ffcp.CP(network(), **SMALL), rows, x="x", y="y", groups="group")
    same(one, two)
    band = one.predict_interval(data["x"], 0.1, groups=data["group"])
    found = predicted(two, rows, groups="group")
    assert torch.allclose(column(found, "upper"), band.upper, atol=1e-4)
    assert set(found["group"]) == {"high", "low"}

    def weighted() -> Any:
        return ffcp.IntervalPredictor(
            network(), calibration=ffcp.calibrations.Weighted("given"), **SMALL
        )

    one = weighted().calibrate(data["x"], data["y"], weights=data["weight"])
    two = calibrate(weighted(), rows, x="x", y="y", weights="weight")
    same(one, two)
    band = one.predict_interval(data["x"], 0.1, weights=data["weight"])
    found = predicted(two, rows, weights="weight")
    assert torch.allclose(column(found, "upper"), band.upper, atol=1e-4)


@pytest.mark.long
def test_rows_that_were_given_to_fit_are_refused_though_each_worker_sees_few() -> None:
    data = numbers()
    learned = ffcp.Learned(network(), **SMALL).fit(data["x"], data["y"])
    with pytest.raises(ValueError, match="fit"):
        calibrate(learned, Rows.of(data), x="x", y="y")


def test_an_update_adds_to_the_points_there_are() -> None:
    data = numbers()
    half = {name: values[:450] for name, values in data.items()}
    rest = {name: values[450:] for name, values in data.items()} | {"id": np.arange(450)}
    one = ffcp.CP(network(), **SMALL).calibrate(half["x"], half["y"])
    one.calibrate(rest["x"], rest["y"], update=True)
    two = calibrate(ffcp.CP(network(), **SMALL), Rows.of(half), x="x", y="y")
    same(one, calibrate(two, Rows.of(rest), x="x", y="y", update=True))


@pytest.mark.long
def test_scores_are_compressed_on_the_way_as_on_one_machine() -> None:
    data = numbers()
    for make in (BANDS["CP"], BANDS["FFCP auto"]):
        one = make().calibrate(data["x"], data["y"], rank_error=0.02)
        rows = Rows.of(data, seed=1)
        two = calibrate(make(), rows, x="x", y="y", rank_error=0.02)
        assert len(one.calibration) == len(two.calibration)
        assert 0 < two.calibration.rank_error <= 0.02
        least, most = (
            make().calibrate(data["x"], data["y"]).predict_interval(data["x"][:1], a)
            for a in (0.1, 0.07)
        )
        upper = two.predict_interval(data["x"][:1], 0.1).upper
        assert bool((upper >= least.upper - 1e-4).all() and (upper <= most.upper + 1e-4).all())
    with pytest.raises(ValueError, match=r"(?i)local"):
        calibrate(BANDS["LCP"](), Rows.of(data), x="x", y="y", rank_error=0.02)


def test_shift_is_learned_from_new_inputs_held_here() -> None:
    data, new = numbers(), numbers()["x"][:300] + 0.3

    def moved() -> Any:
        return ffcp.IntervalPredictor(
            network(), calibration=ffcp.calibrations.Weighted("learn"), seed=0, **SMALL
        )

    one = moved().calibrate(data["x"], data["y"], new=new)
    two = calibrate(moved(), Rows.of(data, seed=4), x="x", y="y", new=(b for b in [new]))
    same(one, two)


@pytest.mark.long
def test_cross_bands_are_predicted_and_say_why_they_cannot_be_calibrated() -> None:
    data = numbers()
    models, folds = [network(), network(), network()], np.arange(N) % 3
    cross = ffcp.CrossConformal(models, folds, **SMALL)
    with pytest.raises(TypeError, match="CrossConformal"):
        calibrate(cross, Rows.of(data), x="x", y="y")
    cross.calibrate(data["x"], data["y"])
    band = cross.predict_interval(data["x"], 0.1)
    found = column(predicted(cross, Rows.of(data)), "lower")
    assert torch.allclose(found, band.lower, atol=1e-4)


@pytest.mark.heavy
def test_risk_control_and_segmentation_work_too() -> None:
    data = numbers()
    torch.manual_seed(0)
    data["y"] = (torch.rand(N, 6) < network(6)(torch.from_numpy(data["x"])).sigmoid()).numpy()
    one = ffcp.RiskControl(network(6), **SMALL).calibrate(data["x"], data["y"])
    two = calibrate(ffcp.RiskControl(network(6), **SMALL), Rows.of(data), x="x", y="y")
    same(one, two)
    sets = one.predict_set(data["x"], 0.1).sets
    assert (column(predicted(two, Rows.of(data)), "sets") == sets).double().mean() > 0.99

    rng = np.random.default_rng(0)
    maps = {
        "x": rng.normal(size=(40, 3, 8, 8)).astype(np.float32),
        "y": rng.integers(0, 4, size=(40, 8, 8)),
        "id": np.arange(40),
    }
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1)
    one = ffcp.segmentation.PixelSets(model, batch_size=16).calibrate(maps["x"], maps["y"])
    two = ffcp.segmentation.PixelSets(model, batch_size=16)
    same(one, calibrate(two, Rows.of(maps), x="x", y="y"))
    mask = one.predict_set(maps["x"], 0.1).mask
    assert (column(predicted(two, Rows.of(maps)), "mask") == mask).double().mean() > 0.99
