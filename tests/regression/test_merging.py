"""Predictors that are merged, copied, pickled, saved and loaded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffcp
from tests.conftest import normal, small_mlp
from tests.core import config, rewrite, spoil
from tests.regression.models import leaky, targets

X, Y, NEW = normal(200, 4, seed=0), normal(200, seed=1), normal(50, 4, seed=2)
GROUPS = ["left" if x < 0 else "right" for x in X[:, 0].tolist()]


def one_and_size(seen: ffcp.BatchOutput) -> Tensor:
    return 1 + seen.output.abs()


PREDICTORS: dict[str, Callable[[], Any]] = {
    "CP": lambda: ffcp.CP(leaky()),
    "CQR": lambda: ffcp.CQR(leaky(2)),
    "FFCP": lambda: ffcp.FFCP(leaky(), "0"),
    "FFCP, layer chosen": lambda: ffcp.FFCP(leaky()),
    "FFCQR": lambda: ffcp.FFCQR(leaky(2), "0"),
    "LCP": lambda: ffcp.LCP(leaky(), ffcp.kernels.Localizer("nearest", bandwidth=80)),
    "LCP, bandwidth chosen": lambda: ffcp.LCP(leaky(), "gaussian"),
    "LCQR": lambda: ffcp.LCQR(leaky(2), "nearest"),
    "FFLCP": lambda: ffcp.FFLCP(leaky(), "0", "nearest"),
    "FFLCQR": lambda: ffcp.FFLCQR(leaky(2), "2", "nearest"),
    "FCP": lambda: ffcp.FCP(leaky(), "0", steps=10),
    "FCP, steps chosen": lambda: ffcp.FCP(leaky(), "0"),
    "FCP, exact": lambda: ffcp.FCP(leaky(), "2", invert="exact", bound="crown"),
    "FCQR": lambda: ffcp.FCQR(leaky(2), "0", invert="exact"),
    "IntervalPredictor": lambda: ffcp.IntervalPredictor(leaky(), scale=one_and_size),
    "Bands of several scales": lambda: ffcp.IntervalPredictor(
        leaky(), scale=[one_and_size, ffcp.scales.GradientNorm("0")]
    ),
}


def calibrated(name: str, **options: object) -> Any:
    predictor = PREDICTORS[name]()
    return predictor.calibrate(X, targets(predictor.model, X), **options)


# -- copies ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", PREDICTORS)
def test_copies_give_the_same_bands_and_share_nothing(name: str, grouped: bool) -> None:
    groups = {"groups": GROUPS} if grouped else {}
    new_groups = {"groups": GROUPS[:50]} if grouped else {}
    predictor = calibrated(name, **groups)
    band = predictor.predict_interval(NEW, **new_groups)  # which works things out, and keeps them
    twins = copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))
    for frozen in twins:
        torch.testing.assert_close(frozen.predict_interval(NEW, **new_groups), band, rtol=0, atol=0)
        frozen.calibrate(X[:60], torch.zeros(60), update=not grouped)
    again = predictor.predict_interval(NEW, **new_groups)
    torch.testing.assert_close(again, band, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["CP", "FFCP", "FCP", "FCP, exact"])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_copy_uses_its_own_weights(name: str, pickled: bool) -> None:
    predictor = calibrated(name)
    band = predictor.predict_interval(NEW)
    frozen = pickle.loads(pickle.dumps(predictor)) if pickled else copy.deepcopy(predictor)
    with torch.no_grad():
        frozen.model[-1].bias += 100
    with pytest.raises(RuntimeError, match="weights"):
        frozen.predict_interval(NEW)
    moved = frozen.calibrate(X, targets(predictor.model, X) + 100).predict_interval(NEW)
    for part, other in zip(moved, band, strict=True):
        torch.testing.assert_close(part, other + 100, rtol=0, atol=1e-3)
    torch.testing.assert_close(predictor.predict_interval(NEW), band, rtol=0, atol=0)


# -- merging -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["CP", "CQR", "FFCP", "FFCQR", "LCP", "FCP", "FCQR", "IntervalPredictor"]
)
def test_two_workers_merge_into_one(name: str) -> None:
    whole = calibrated(name)
    y = targets(whole.model, X)
    parts = [PREDICTORS[name]().calibrate(X[i::2], y[i::2]) for i in range(2)]
    merged = parts[0].merge(parts[1])
    torch.testing.assert_close(merged.predict_interval(NEW), whole.predict_interval(NEW))
    empty = PREDICTORS[name]().merge(whole)
    torch.testing.assert_close(empty.predict_interval(NEW), whole.predict_interval(NEW))


def test_a_predictor_without_calibration_cannot_be_merged() -> None:
    full, empty = ffcp.CP(small_mlp()).calibrate(X, Y), ffcp.CP(small_mlp())
    for receiver in (full, empty):
        with pytest.raises(ValueError, match="calibrate"):
            receiver.merge(ffcp.CP(small_mlp()))
    assert len(full.calibration) == 200
    assert len(empty.calibration) == 0


def test_other_settings_are_named() -> None:
    one = ffcp.FFCP(small_mlp(), "0").calibrate(X, Y)
    with pytest.raises(ValueError, match=r"feature.*norm"):
        one.merge(ffcp.FFCP(small_mlp(), "3", norm=1).calibrate(X, Y))
    with pytest.raises(ValueError, match="joint"):
        one.merge(ffcp.FFCP(small_mlp(), "0", joint=True).calibrate(X, Y))
    with pytest.raises(ValueError, match="Constant"):
        one.merge(ffcp.CP(small_mlp()).calibrate(X, Y))
    assert len(one.calibration) == 200


def test_groups_merge_by_their_names() -> None:
    whole = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    expected = whole.predict_interval(X, groups=GROUPS).upper
    left = X[:, 0] < 0
    one, two = (
        ffcp.CP(small_mlp()).calibrate(X[rows], Y[rows], groups=[name] * int(rows.sum()))
        for name, rows in {"left": left, "right": ~left}.items()
    )
    merged = one.merge(two)  # each worker has a group that the other has not
    assert merged.calibration.groups == {"left": int(left.sum()), "right": int((~left).sum())}
    torch.testing.assert_close(merged.predict_interval(X, groups=GROUPS).upper, expected)
    empty = ffcp.CP(small_mlp()).merge(whole)  # an empty one takes groups over
    torch.testing.assert_close(empty.predict_interval(X, groups=GROUPS).upper, expected)
    plain = ffcp.CP(small_mlp()).calibrate(X, Y)
    with pytest.raises(ValueError, match="Mondrian"):
        plain.merge(whole)
    with pytest.raises(ValueError, match="groups"):
        whole.merge(plain)


# -- files -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", PREDICTORS)
def test_a_saved_predictor_gives_the_same_bands(name: str, tmp_path: Path) -> None:
    predictor = calibrated(name)
    predictor.save(tmp_path / "bands.safetensors")
    loaded = PREDICTORS[name]().load(tmp_path / "bands.safetensors")
    assert config(loaded) == config(predictor)
    band = predictor.predict_interval(NEW)
    torch.testing.assert_close(loaded.predict_interval(NEW), band, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize(
    "how", ["a tensor too many", "no scores", "no description", "a weight of the model"]
)
@pytest.mark.parametrize("name", ["CP", "FFCP, layer chosen", "LCP, bandwidth chosen", "FCP"])
def test_a_file_that_does_not_fit_changes_nothing(name: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "bands.safetensors"
    other = PREDICTORS[name]().calibrate(NEW, torch.zeros(50))
    other.save(path)
    spoil(path, how)

    predictor = calibrated(name)
    band, before = predictor.predict_interval(NEW), config(predictor)
    state = copy.deepcopy(predictor.state_dict())
    with pytest.raises(ffcp.CalibrationFileError, match=path.name):
        predictor.load(path)
    assert config(predictor) == before
    assert state.keys() == predictor.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in predictor.state_dict().items())
    torch.testing.assert_close(predictor.predict_interval(NEW), band, rtol=0, atol=0)


def test_a_file_of_groups_that_lacks_their_names_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bands.safetensors"
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    predictor.save(path)
    rewrite(path, lambda tensors, _: tensors.pop("labels"))
    plain = ffcp.CP(small_mlp()).calibrate(X, Y)
    band = plain.predict_interval(NEW)
    with pytest.raises(ffcp.CalibrationFileError, match=path.name):
        plain.load(path)
    torch.testing.assert_close(plain.predict_interval(NEW), band, rtol=0, atol=0)


def test_loading_replaces_what_was_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "bands.safetensors"
    saved = ffcp.LCP(small_mlp(), "gaussian").calibrate(X, Y)
    saved.save(path)
    other = ffcp.LCP(small_mlp(), "gaussian").calibrate(X[:100], 3 * Y[:100])
    other.predict_interval(NEW)
    other.load(path)
    assert other.bandwidth_choice == saved.bandwidth_choice
    torch.testing.assert_close(other.predict_interval(NEW), saved.predict_interval(NEW))
    other.calibrate(X, Y)  # and what was left open is chosen anew
    torch.testing.assert_close(other.predict_interval(NEW), saved.predict_interval(NEW))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize(
    ("make", "has_ratio"),
    [
        (lambda model: ffcp.FFCP(model, seed=0), False),
        (lambda model: ffcp.LCP(model, seed=0), False),
        (lambda m: ffcp.CP(m, calibration=ffcp.calibrations.Weighted("learn"), seed=0), True),
        (lambda model: ffcp.Learned(model, seed=0), False),
        (lambda model: ffcp.Auto(model, seed=0), False),
        (lambda m: ffcp.Auto(m, calibration=ffcp.calibrations.Weighted("learn"), seed=0), True),
        (lambda model: ffcp.FCP(model, "0", seed=0), False),
    ],
    ids=["layer", "bandwidth", "ratio", "learned", "method", "method and ratio", "steps"],
)
def test_workers_that_take_over_what_one_chose_can_be_merged(
    make: Any, has_ratio: bool, tmp_path: Any
) -> None:
    x, model = normal(300, 4, seed=0), small_mlp()
    y = normal(300, seed=1) * (1 + x[:, 0].abs())
    first = make(model)
    given = {"new": x + 0.3} if has_ratio else {}
    first.calibrate(x[:150], y[:150], **given)
    worker = copy.deepcopy(first.settled())
    assert len(worker.calibration) == 0 < len(first.calibration)
    worker.calibrate(x[150:], y[150:])
    assert len(worker.calibration) == 150  # none of them had to choose
    worker.save(tmp_path / "worker")
    again = ffcp.load(tmp_path / "worker", worker.model)
    assert torch.equal(again(x[:5]).upper, worker(x[:5]).upper)
    before = len(first.calibration)
    assert len(first.merge(worker).calibration) == before + 150
