"""Saved calibrations: made again without repeating a setting, or refused without a trace."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.segmentation import PixelSets
from tests.conftest import normal, small_mlp
from tests.core import FORMAT, config, rewrite, state_of_format

X, Y = normal(200, 4, seed=2), normal(200, seed=3)
LABELS = torch.arange(200) % 5
IMAGES, MAPS = normal(30, 2, 4, 4, seed=4), torch.arange(480).reshape(30, 4, 4) % 3


def classifier() -> nn.Sequential:
    return small_mlp(outputs=5)


def segmenter() -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(2, 3, 1)


def spread(seen: ffcp.BatchOutput) -> Tensor:
    return 1 + seen.output.abs()


def first_column(x: Tensor) -> Tensor:
    return x[:, :1]


def sign(x: Tensor) -> Tensor:
    return x[:, 0] > 0


def margin(seen: ffcp.BatchOutput) -> Tensor:
    return seen.output.amax(dim=1, keepdim=True) - seen.output


class Steep(ffcp.kernels.Kernel):
    name = "steep"

    def log_weight(self, squared: Tensor) -> Tensor:
        return -squared


BANDS = {
    "CP": lambda: ffcp.CP(small_mlp(), joint=0.5, batch_size=7),
    "CQR": lambda: ffcp.CQR(small_mlp(outputs=2), missing=True),
    "FFCP": lambda: ffcp.FFCP(small_mlp(), "3", norm=math.inf, floor=1e-3, joint="bonferroni"),
    "FFCP auto": lambda: ffcp.FFCP(small_mlp(), seed=4, selection_alpha=Fraction(1, 5)),
    "FFCP list": lambda: ffcp.FFCP(small_mlp(), ["0", "3"], selection_fraction=0.3),
    "FFCQR": lambda: ffcp.FFCQR(small_mlp(outputs=2), "0", method=ffcp.scales.Sketch(4, seed=1)),
    "smooth": lambda: ffcp.FFCP(small_mlp(), "0", method=ffcp.scales.Smooth(0.1, 3)),
    "LCP": lambda: ffcp.LCP(small_mlp(), ffcp.kernels.Localizer("box", on="input", bandwidth=9.0)),
    "LCQR": lambda: ffcp.LCQR(small_mlp(outputs=2), "gaussian", guarantee="none"),
    "FFLCP": lambda: ffcp.FFLCP(small_mlp(), "0", ffcp.kernels.Localizer("laplace", on="feature")),
    "FFLCQR": lambda: ffcp.FFLCQR(
        small_mlp(outputs=2), "0", ffcp.kernels.Localizer(ffcp.kernels.Gaussian())
    ),
    "FCP": lambda: ffcp.FCP(small_mlp(), "3", steps=2, bound="crown", norm=2),
    "FCP auto": lambda: ffcp.FCP(small_mlp(), "3"),
    "FCQR": lambda: ffcp.FCQR(small_mlp(outputs=2), "3", steps=2, optimizer="adam"),
    "pieces": lambda: ffcp.IntervalPredictor(
        small_mlp(outputs=3), ffcp.scores.Quantiles(0, 2, median=1), ffcp.scales.GradientNorm("0"),
        ffcp.calibrations.Mondrian(
            ffcp.calibrations.Local(ffcp.kernels.Localizer("nearest", bandwidth=30))
        ),
    ),
    "choice": lambda: ffcp.IntervalPredictor(
        small_mlp(), scale=[ffcp.scales.GradientNorm("0"), ffcp.scales.Constant()]
    ),
}  # fmt: skip
SETS = {
    "LAC": lambda: ffcp.LAC(classifier(), temperature="fit", class_conditional=True),
    "APS": lambda: ffcp.APS(classifier(), randomized=False, allow_zero_sets=True),
    "RAPS": lambda: ffcp.RAPS(classifier(), tune="size", tune_fraction=0.3, seed=9),
    "FFRAPS": lambda: ffcp.FFRAPS(classifier(), 0.02, gradient="feature", feature="0"),
    "pieces": lambda: ffcp.SetPredictor(
        classifier(), ffcp.scores.RAPS(0.1, 2), ffcp.calibrations.ByLabel()
    ),
    "pixels": lambda: PixelSets(segmenter(), ignore=2, floor=1e-4),
    "pixels at a layer": lambda: PixelSets(segmenter(), "input", outputs="double_log"),
}  # fmt: skip


def of_model(predictor: Any) -> nn.Module:
    model = copy.deepcopy(predictor.model)
    return model.network if "network" in model._modules else model


def same_bands(one: Any, other: Any, groups: Any = None) -> bool:
    if isinstance(one, PixelSets):
        return torch.equal(one.predict_set(IMAGES).mask, other.predict_set(IMAGES).mask)
    if hasattr(one, "predict_set"):
        pinned = [p.predict_set(X, first_row=0, groups=groups).mask for p in (one, other)]
        return torch.equal(*pinned)
    bands = [p.predict_interval(X[:30], 0.2, groups=groups) for p in (one, other)]
    return torch.equal(bands[0].lower, bands[1].lower) and torch.equal(*(b.upper for b in bands))


def calibrated(predictor: Any, groups: Any = None) -> Any:
    x, y = (IMAGES, MAPS) if isinstance(predictor, PixelSets) else (X, Y)
    y = LABELS if isinstance(predictor, ffcp.SetPredictor) else y
    return predictor.calibrate(x, y, groups=groups)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calibration.safetensors"


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("make", [*BANDS.values(), *SETS.values()], ids=[*BANDS, *SETS])
def test_a_predictor_is_made_again_from_its_file(make, path: Path) -> None:
    kind = make()
    by_groups = isinstance(kind.calibration, ffcp.calibrations.Mondrian)
    groups = [("a", "b")[row % 2] for row in range(200)] if by_groups else None
    old = calibrated(kind, groups)
    old.save(path)
    new = ffcp.load(path, of_model(old))
    assert type(new) is type(old)
    assert config(new) == config(old)
    for option in (
        "batch_size",
        "seed",
        "selection_fraction",
        "selection_alpha",
        "allow_zero_sets",
    ):
        assert getattr(new, option, None) == getattr(old, option, None)
    assert getattr(new, "choice", None) == getattr(old, "choice", None)
    with pytest.raises(ValueError):  # noqa: PT011  # the same scores: known by file, or by seed
        old.merge(new)
    assert same_bands(old, new, None if groups is None else groups[:30])
    new.save(path)  # and once more
    assert same_bands(old, ffcp.load(path, of_model(old)), None if groups is None else groups[:30])


def test_groups_given_when_calibrating_come_back(path: Path) -> None:
    groups = [("a", "b")[row % 2] for row in range(200)]
    old = ffcp.CP(small_mlp()).calibrate(X, Y, groups=groups)
    old.save(path)
    assert same_bands(old, ffcp.load(path, small_mlp()), groups[:30])


def test_a_layer_given_as_a_module_comes_back(path: Path) -> None:
    model = small_mlp()
    ffcp.FFCP(model, model[3]).calibrate(X, Y).save(path)
    assert ffcp.load(path, small_mlp()).feature == "3"


PARTS = {
    "scale": (lambda **own: ffcp.IntervalPredictor(small_mlp(), **own), spread, "spread"),
    "score": (lambda **own: ffcp.SetPredictor(classifier(), **own), margin, "margin"),
    "localizer": (
        lambda **own: ffcp.LCP(small_mlp(), **own),
        ffcp.kernels.Localizer("gaussian", on=first_column), "first_column",
    ),
    "calibration": (
        lambda **own: ffcp.IntervalPredictor(small_mlp(), **own),
        ffcp.calibrations.Mondrian(by=sign), "sign",
    ),
    "head": (
        lambda **own: ffcp.FCP(small_mlp(), "3", steps=2, **own), small_mlp()[4:], "Sequential",
    ),
}  # fmt: skip


@pytest.mark.parametrize("argument", PARTS)
def test_a_part_of_the_users_is_asked_for_by_name(argument: str, path: Path) -> None:
    make, own, word = PARTS[argument]
    old = calibrated(make(**{argument: own}))
    old.save(path)
    with pytest.raises(ffcp.CalibrationFileError, match=argument) as found:
        ffcp.load(path, of_model(old))
    assert str(path) in str(found.value)
    assert word in str(found.value)
    assert same_bands(old, ffcp.load(path, of_model(old), **{argument: own}))
    assert same_bands(old, make(**{argument: own}).load(path))


def test_a_kernel_of_the_users_is_asked_for(path: Path) -> None:
    near = ffcp.kernels.Localizer(Steep(), bandwidth=2.0)
    ffcp.LCP(small_mlp(), near).calibrate(X, Y).save(path)
    with pytest.raises(ffcp.CalibrationFileError, match="localizer"):
        ffcp.load(path, small_mlp())
    assert ffcp.load(path, small_mlp(), localizer=near).bandwidth == 2


def test_a_class_of_the_users_is_loaded_by_itself(path: Path) -> None:
    class Mine(ffcp.CP):
        pass

    Mine(small_mlp()).calibrate(X, Y).save(path)
    with pytest.raises(ffcp.CalibrationFileError, match="own"):
        ffcp.load(path, small_mlp())
    assert len(Mine(small_mlp()).load(path).calibration) == 200


def test_what_is_given_takes_the_place_of_what_was_saved(path: Path) -> None:
    ffcp.CP(small_mlp(), batch_size=7).calibrate(X, Y).save(path)
    assert ffcp.load(path, small_mlp(), batch_size=50).batch_size == 50
    with pytest.raises(ffcp.CalibrationFileError, match="joint"):
        ffcp.load(path, small_mlp(), joint=True)
    with pytest.raises(ffcp.CalibrationFileError, match="nonsense"):
        ffcp.load(path, small_mlp(), nonsense=True)


def test_other_weights_and_missing_files(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=path.name):
        ffcp.load(path, small_mlp())
    ffcp.CP(small_mlp()).calibrate(X, Y).save(path)
    other = small_mlp()
    nn.init.ones_(other[0].weight)
    with pytest.raises(ffcp.CalibrationFileError, match="weights"):
        ffcp.load(path, other)


_FULL = """
import resource, signal, sys
import ffcp, torch
x, y = torch.randn(1000, 1), torch.randn(1000)
predictor = ffcp.CP(torch.nn.Linear(1, 1)).calibrate(x, y)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
try:
    predictor.save(sys.argv[1])
except OSError:
    sys.exit(7)
"""


@pytest.mark.heavy
def test_a_disk_that_is_full_leaves_the_old_file(path: Path) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    predictor.save(path)
    before = path.read_bytes()
    assert subprocess.run([sys.executable, "-c", _FULL, str(path)]).returncode == 7
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]  # and nothing half written


def test_a_file_of_another_version_says_so(path: Path) -> None:
    ffcp.CP(small_mlp()).calibrate(X, Y).save(path)
    path.write_bytes(path.read_bytes().replace(FORMAT, FORMAT[:-1] + b"3", 1))
    with pytest.raises(ffcp.CalibrationFileError, match="version"):
        ffcp.load(path, small_mlp())


def test_a_state_dict_of_another_version_says_so() -> None:
    # Scores of LAC and APS meant another thing before: their thresholds would cover too little.
    predictor = ffcp.LAC(classifier()).calibrate(X, Y.gt(0).long())
    for name in ("ffcp-calibration-3", None):
        with pytest.raises(ffcp.CalibrationFileError, match="version"):
            ffcp.LAC(classifier()).load_state_dict(state_of_format(predictor, name))


def test_only_known_predictors_are_made(path: Path) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    for name in ("Marginal", "print", "os.system", None, ["CP"]):
        predictor.save(path)
        rewrite(path, lambda _, described: described["predictor"].update({"class": name}))  # noqa: B023
        with pytest.raises(ffcp.CalibrationFileError, match=path.name):
            ffcp.load(path, small_mlp())


# -- state_dict --------------------------------------------------------------------------------


def damaged_states(state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    scores, settings = state["calibration.scores"], state["_extra_state"]
    return {
        "flipped": state | {"calibration.scores": scores.flip(0)},
        "half": state | {"calibration.scores": scores.half()},
        "shorter": state | {"calibration.scores": scores[:50]},
        "changed": state | {"calibration.scores": scores * 2},
        "settings": state | {"_extra_state": settings[:-5]},
        "no settings": {k: v for k, v in state.items() if k != "_extra_state"},
        "no scores": {k: v for k, v in state.items() if k != "calibration.scores"},
        "more": state | {"calibration.more": scores},
    }


@pytest.mark.parametrize(
    "damage", damaged_states(ffcp.CP(small_mlp()).calibrate(X, Y).state_dict())
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_damaged_state_dict_changes_nothing(damage: str, nested: bool) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:80], Y[:80])
    other = ffcp.CP(small_mlp()).calibrate(X, Y)
    with torch.no_grad():
        other.model[0].weight.zero_()
    state = damaged_states(other.state_dict())[damage]
    before = predictor.predict_interval(X)
    module: nn.Module = predictor
    if nested:
        state = {f"inside.{name}": tensor for name, tensor in state.items()}
        module = nn.ModuleDict({"inside": predictor})
    with pytest.raises(ffcp.CalibrationFileError, match="state_dict"):
        module.load_state_dict(state)
    torch.testing.assert_close(predictor.predict_interval(X), before, rtol=0, atol=0)


class Scaled(nn.Module):
    """A network whose state does not tell all of its function."""

    def __init__(self, scale: float = 1.0, slope: float = 0.1) -> None:
        super().__init__()
        self.body, self.bend = small_mlp(), nn.LeakyReLU(slope)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.body(x)) * self.scale


@pytest.mark.parametrize("other", [Scaled(scale=2.0), Scaled(slope=0.2)])
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_another_function_changes_nothing(other: Scaled, assign: bool) -> None:
    state = ffcp.CP(Scaled()).calibrate(X, Y).state_dict()
    ffcp.CP(Scaled()).load_state_dict(state, assign=assign)  # it is well
    predictor = ffcp.CP(other).calibrate(X[:80], Y[:80])
    before = predictor.predict_interval(X)
    with pytest.raises(ffcp.CalibrationFileError, match="weights"):
        predictor.load_state_dict(state, assign=assign)
    torch.testing.assert_close(predictor.predict_interval(X), before, rtol=0, atol=0)


def test_a_state_dict_with_other_weights_than_its_calibration_changes_nothing() -> None:
    whole = ffcp.CP(small_mlp()).calibrate(X, Y).state_dict()
    moved = {**whole, "model.0.weight": whole["model.0.weight"] + 1}
    wide = {**whole, "model.0.weight": torch.zeros(9, 9)}
    predictor = ffcp.CP(small_mlp()).calibrate(X[:80], Y[:80])
    before = predictor.predict_interval(X)
    for state in (moved, wide):
        with pytest.raises(ffcp.CalibrationFileError, match="state_dict"):
            predictor.load_state_dict(state)
        torch.testing.assert_close(predictor.predict_interval(X), before, rtol=0, atol=0)
    predictor.load_state_dict(whole)
    assert len(predictor.calibration) == len(X)


def test_a_state_of_the_model_alone_leaves_the_calibration() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    before = predictor.predict_interval(X)
    weights = {f"model.{name}": t for name, t in small_mlp().state_dict().items()}
    predictor.load_state_dict(weights, strict=False)
    torch.testing.assert_close(predictor.predict_interval(X), before, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        predictor.load_state_dict(weights)


# -- merging -----------------------------------------------------------------------------------


def test_points_do_not_count_twice(path: Path) -> None:
    one, two = (ffcp.CP(small_mlp()).calibrate(X[i::2], Y[i::2]) for i in range(2))
    one.save(path)
    copies = (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), ffcp.load(path, small_mlp()))
    for same in copies:
        with pytest.raises(ValueError, match="already"):
            one.merge(same)
    one.calibrate(X[:10], Y[:10], update=True)
    with pytest.raises(ValueError, match="already"):
        one.merge(copies[0])
    one.merge(two)
    for again, there in ((one, two), (two, one), (copies[0], one)):
        with pytest.raises(ValueError, match="already"):
            again.merge(there)
    assert len(one.calibration) == 210
    one.calibrate(X[:50], Y[:50])  # all anew
    assert len(one.merge(two).calibration) == 150


def test_workers_that_chose_differently_are_told_what_to_do() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        one = ffcp.FFCP(small_mlp(), ["0"]).calibrate(X, Y)
        two = ffcp.FFCP(small_mlp(), "3").calibrate(X, Y)
        near = ffcp.LCP(small_mlp(), "gaussian").calibrate(X, Y)
        far = ffcp.LCP(small_mlp(), ffcp.kernels.Localizer("gaussian", bandwidth=99.0)).calibrate(
            X, Y
        )
    with pytest.raises(ValueError, match=f"here '{one.feature}'"):
        one.merge(two)
    with pytest.raises(ValueError, match="bandwidth"):
        near.merge(far)


# -- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["pathlib.Path.open", "os.replace", "os.fsync"])
def test_a_full_disk_leaves_the_old_file(place: str, path: Path, monkeypatch) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    predictor.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(place, _full)
    with pytest.raises(OSError, match="No space left"):
        predictor.calibrate(X[:20], Y[:20]).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")
