"""LAC, APS, RAPS and FFRAPS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ffcp
from tests.recorded import material
from tests.recorded.material import Problem
from tests.recorded.recording import Values, case, warned
from tests.recorded.shared import CUTS, through_file, through_state

FIXED, AUTO = "labels", "labels_auto"
ALPHAS = (0.05, 0.5, 0.2)


def sets(predictor: Any, x: Any, alphas: Sequence[Any] = ALPHAS, **options: Any) -> Values:
    """Give the masks of label sets at several levels, and at the last one some labels in order."""
    found: Values = {"method": type(predictor).__name__}
    for alpha in alphas:
        held = predictor.predict_set(x, alpha, **options)
        found[f"mask at {alpha}"] = held.mask
    found[f"labels at {alpha}"] = [labels.tolist() for labels in held.labels[:6]]
    return found


def scored(predictor: Any, p: Problem, alphas: Sequence[Any] = ALPHAS) -> Values:
    """Give sets and scores."""
    found = sets(predictor, p.new, alphas)
    found["score"] = predictor.score(p.new[:5], p.new_y[:5])
    found["scores of all labels"] = predictor.score_all(p.new[:2])
    return {**found, **settings(predictor)}


def settings(predictor: Any) -> Values:
    """Give the settings in use."""
    names = ("temperature", "kreg", "lam", "delta", "feature", "classes")
    return {name: getattr(predictor, name) for name in names if hasattr(predictor, name)}


def choice_values(choice: Any) -> Values:
    """Flatten what tuning saw and took."""
    names = ("temperature", "kreg", "lam", "delta", "rows", "alpha", "criterion")
    found: Values = {f"chosen {name}": getattr(choice, name) for name in names}
    for name in ("lam", "delta", "mean_size", "violation"):
        found[f"{name} of candidates"] = [getattr(c, name) for c in choice.candidates]
    return found


METHODS: dict[str, Callable[..., Any]] = {
    "lac": ffcp.LAC,
    "aps": ffcp.APS,
    "raps": partial(ffcp.RAPS, lam=0.05, kreg=2),
    "ffraps_softmax": partial(ffcp.FFRAPS, delta=0.1, lam=0.05, kreg=2),
    "ffraps_feature": partial(
        ffcp.FFRAPS, delta=0.1, lam=0.05, kreg=2, gradient="feature", feature="0"
    ),
}
Make = Callable[..., Any]


# -- given settings ----------------------------------------------------------------------------


def _with(make: Make, options: dict[str, Any]) -> Values:
    p = material.classification()
    return scored(make(p.model, **options).calibrate(p.x, p.y), p)


def _classes(make: Make, options: dict[str, Any]) -> Values:
    p = material.classification(classes=4, rows=160)
    predictor = make(p.model, class_conditional=True, **options).calibrate(p.x, p.y)
    # Not randomized, the least likely label has the score 1 up to rounding: a threshold must be
    # below it.
    return scored(predictor, p, (0.5, 0.2) if predictor.randomized else (0.7, 0.5))


def _loader_cuts(make: Make) -> Values:
    p = material.classification()
    expected = make(p.model).calibrate(p.x, p.y).predict_set(p.new, 0.2).mask
    found: Values = {"mask": expected}
    for cut in CUTS:
        predictor = make(p.model, batch_size=5).calibrate(material.pieces(p.x, p.y, cut))
        mask = predictor.predict_set(p.new.numpy(), 0.2).mask
        found[f"same in batches of {cut}"] = torch.equal(mask, expected)
    return found


def _update(make: Make) -> Values:
    p = material.classification()
    predictor = make(p.model).calibrate(p.x[:60], p.y[:60])
    predictor.calibrate(p.x[60:], p.y[60:], update=True)
    return sets(predictor, p.new)


def _merge(make: Make) -> Values:
    p = material.classification()
    first = make(p.model, seed=1).calibrate(p.x[:60], p.y[:60])
    second = make(p.model, seed=2).calibrate(p.x[60:], p.y[60:])
    return sets(first.merge(second), p.new)


def _handed_on(make: Make, how: Callable[[Any, Any], Any]) -> Values:
    p = material.classification()
    predictor = make(p.model).calibrate(p.x, p.y)
    return scored(how(predictor, make(p.model)), p)


def _updated_after_load(make: Make) -> Values:
    """Random numbers count on where the saved calibration stopped."""
    p = material.classification()
    fresh = through_file(make(p.model).calibrate(p.x[:60], p.y[:60]), make(p.model))
    return sets(fresh.calibrate(p.x[60:], p.y[60:], update=True), p.new)


def _first_row(make: Make) -> Values:
    p = material.classification()
    predictor = make(p.model).calibrate(p.x, p.y)
    whole = predictor.predict_set(p.new, 0.2).mask
    rest = predictor.predict_set(p.new[3:], 0.2, first_row=3).mask
    far = predictor.score_all(p.new[:2], first_row=1000)
    one = predictor.score(p.new[:2], p.new_y[:2], first_row=1000)
    return {"whole": whole, "same": torch.equal(rest, whole[3:]), "far": far, "one": one}


def _too_few(make: Make) -> Values:
    p = material.classification(rows=8)
    predictor = make(p.model).calibrate(p.x, p.y)
    with warned() as names:
        found = sets(predictor, p.new, (0.1,))
    return {**found, "warnings": names}


def _too_few_of_a_class(make: Make) -> Values:
    p = material.classification(rows=70)
    predictor = make(p.model, class_conditional=True).calibrate(p.x, p.y)
    with warned() as names:
        found = sets(predictor, p.new, (0.1,))
    return {**found, "warnings": names}


def _class_conditional_shared(make: Make) -> Values:
    """Merge, update and load thresholds of each class."""
    p = material.classification(classes=4, rows=160)
    made = partial(make, p.model, class_conditional=True)
    first = made(seed=1).calibrate(p.x[:60], p.y[:60])
    first.calibrate(p.x[60:90], p.y[60:90], update=True)
    first.merge(made(seed=2).calibrate(p.x[90:], p.y[90:]))
    return sets(through_file(first, made(seed=1)), p.new, (0.5, 0.2))


for _name, _make in METHODS.items():
    for _what, _options in {
        "default": {},
        "temperature_2": {"temperature": 2.0},
        "allow_zero_sets": {"allow_zero_sets": True},
        "seed_5": {"seed": 5},
        "randomized_false": {"randomized": False},
        "randomized_false_allow_zero_sets": {"randomized": False, "allow_zero_sets": True},
    }.items():
        if _name == "lac" and ("randomized" in _options or "seed" in _options):
            continue
        case(FIXED, f"{_name}_{_what}")(partial(_with, _make, _options))
        if _what in ("default", "randomized_false"):
            case(FIXED, f"{_name}_class_conditional_{_what}")(partial(_classes, _make, _options))
    for _what, _function in {
        "loader_cuts": _loader_cuts,
        "update": _update,
        "merge_two_workers": _merge,
        "save_and_load": partial(_handed_on, how=through_file),
        "state_dict": partial(_handed_on, how=through_state),
        "update_after_load": _updated_after_load,
        "first_row": _first_row,
        "too_few_points_warning": _too_few,
        "class_conditional_too_few_points_warning": _too_few_of_a_class,
        "class_conditional_merge_update_load": _class_conditional_shared,
    }.items():
        case(FIXED, f"{_name}_{_what}")(partial(_function, _make))

for _what, _make in {
    "raps_settings_left_out": ffcp.RAPS,
    "raps_lam_0": partial(ffcp.RAPS, lam=0.0, kreg=0),
    "raps_lam_large_kreg_0": partial(ffcp.RAPS, lam=0.5, kreg=0),
    "ffraps_settings_left_out": ffcp.FFRAPS,
    "ffraps_delta_0": partial(ffcp.FFRAPS, delta=0.0, lam=0.05, kreg=2),
    "ffraps_delta_large": partial(ffcp.FFRAPS, delta=0.8, lam=0.05, kreg=2),
    "ffraps_feature_input": partial(
        ffcp.FFRAPS, delta=0.2, lam=0.05, kreg=2, gradient="feature", feature="input"
    ),
    "ffraps_feature_1_temperature_2": partial(
        ffcp.FFRAPS, delta=0.2, lam=0.05, kreg=2, gradient="feature", feature="1", temperature=2.0
    ),
}.items():
    case(FIXED, _what)(partial(_with, _make, {}))


@case(FIXED, "ffraps_delta_0_is_raps")
def _() -> Values:
    p = material.classification()
    raps = ffcp.RAPS(p.model, 0.05, 2).calibrate(p.x, p.y)
    ffraps = ffcp.FFRAPS(p.model, 0.0, 0.05, 2).calibrate(p.x, p.y)
    return {"same": torch.equal(raps.score_all(p.new), ffraps.score_all(p.new))}


@case(FIXED, "raps_dict_input")
def _() -> Values:
    model = material.fill(material.TwoInputs(5), seed=9, gain=3.0)
    x = material.normal(108, 3, seed=21)
    parts = {"left": x[:, :2], "right": x[:, 2:]}
    y = material.drawn(material.said(model, parts), seed=22)
    calibrating = {key: part[:100] for key, part in parts.items()}
    predictor = ffcp.RAPS(model, 0.05, 2).calibrate(calibrating, y[:100])
    return sets(predictor, {key: part[100:] for key, part in parts.items()})


@case(FIXED, "aps_many_classes")
def _() -> Values:
    model = material.fill(nn.Sequential(nn.Linear(4, 80)), seed=17)
    x = material.normal(124, 4, seed=21)
    y = material.drawn(material.said(model, x), seed=22)
    return sets(ffcp.APS(model).calibrate(x[:120], y[:120]), x[120:], (0.3, 0.7))


class _Whole(nn.Module):
    """Logits that are small whole numbers, so that many are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def _ties(make: Make, options: dict[str, Any]) -> Values:
    x = material.integers(128, 6, below=3, seed=91).double()
    y = material.integers(128, below=6, seed=92)
    return sets(make(_Whole(), **options).calibrate(x[:120], y[:120]), x[120:], (0.3, 0.6))


for _name, _make in METHODS.items():
    if _name != "ffraps_feature":
        _options = {} if _name == "lac" else {"randomized": False}
        case(FIXED, f"{_name}_equal_logits")(partial(_ties, _make, _options))


@case(FIXED, "aps_sets_of_more_than_64_labels")
def _() -> Values:
    model = material.fill(nn.Sequential(nn.Linear(4, 150)), seed=17, gain=0.5)
    x = material.normal(122, 4, seed=21)
    y = material.drawn(material.said(model, x), seed=22)
    predictor = ffcp.APS(model).calibrate(x[:120], y[:120])
    return {"mask": predictor.predict_set(x[120:], 0.1).mask}


# -- settings that are chosen ------------------------------------------------------------------


def _auto(make: Make, options: dict[str, Any]) -> Values:
    p = material.classification(rows=240, hotter=1.6)
    predictor = make(p.model, **options).calibrate(p.x, p.y)
    found = {**sets(predictor, p.new), **settings(predictor), **choice_values(predictor.choice)}
    return {**found, "score": predictor.score(p.new[:3], p.new_y[:3])}


for _name, _make in METHODS.items():
    case(AUTO, f"{_name}_auto_temperature")(partial(_auto, _make, {"temperature": "fit"}))
    case(AUTO, f"{_name}_auto_temperature_options")(
        partial(_auto, _make, {"temperature": "fit", "tune_fraction": 0.4, "seed": 3})
    )

_feature = partial(ffcp.FFRAPS, gradient="feature", feature="0")
for _what, _make, _options in (
    ("raps_auto_size", ffcp.RAPS, {"tune": "size"}),
    ("raps_auto_coverage", ffcp.RAPS, {"tune": "coverage"}),
    ("raps_auto_size_lam_given", ffcp.RAPS, {"tune": "size", "lam": 0.1}),
    ("raps_auto_size_kreg_given", ffcp.RAPS, {"tune": "size", "kreg": 2}),
    ("raps_auto_size_and_temperature", ffcp.RAPS, {"tune": "size", "temperature": "fit"}),
    ("raps_auto_size_not_randomized", ffcp.RAPS, {"tune": "size", "randomized": False}),
    ("raps_auto_size_allow_zero_sets", ffcp.RAPS, {"tune": "size", "allow_zero_sets": True}),
    (
        "raps_auto_size_options",
        ffcp.RAPS,
        {"tune": "size", "tune_fraction": 0.4, "tune_alpha": 0.3, "seed": 6},
    ),
    ("ffraps_auto_size_softmax", ffcp.FFRAPS, {"tune": "size"}),
    ("ffraps_auto_coverage_softmax", ffcp.FFRAPS, {"tune": "coverage"}),
    ("ffraps_auto_size_feature", _feature, {"tune": "size"}),
    ("ffraps_auto_coverage_feature", _feature, {"tune": "coverage"}),
    ("ffraps_auto_size_delta_given", ffcp.FFRAPS, {"tune": "size", "delta": 0.05}),
    ("ffraps_auto_coverage_and_temperature", _feature, {"tune": "coverage", "temperature": "fit"}),
):
    case(AUTO, _what)(partial(_auto, _make, _options))


@case(AUTO, "raps_auto_size_class_conditional")
def _() -> Values:
    p = material.classification(classes=4, rows=240)
    predictor = ffcp.RAPS(p.model, tune="size", class_conditional=True).calibrate(p.x, p.y)
    return {**sets(predictor, p.new, (0.5, 0.2)), **choice_values(predictor.choice)}


@case(AUTO, "raps_auto_size_loader_cuts")
def _() -> Values:
    p = material.classification(rows=240)
    predictor = ffcp.RAPS(p.model, tune="size").calibrate(p.x, p.y)
    expected = predictor.predict_set(p.new, 0.2).mask
    found: Values = {"mask": expected}
    for cut in CUTS:
        cut_up = ffcp.RAPS(p.model, tune="size").calibrate(material.pieces(p.x, p.y, cut))
        found[f"same in batches of {cut}"] = torch.equal(
            cut_up.predict_set(p.new, 0.2).mask, expected
        )
    return found


@case(AUTO, "raps_auto_size_update")
def _() -> Values:
    p = material.classification(rows=240)
    predictor = ffcp.RAPS(p.model, tune="size").calibrate(p.x[:120], p.y[:120])
    predictor.calibrate(p.x[120:], p.y[120:], update=True)
    return {**sets(predictor, p.new), **choice_values(predictor.choice)}


@case(AUTO, "raps_auto_size_merge_worker_with_these_settings")
def _() -> Values:
    p = material.classification(rows=240)
    first = ffcp.RAPS(p.model, tune="size").calibrate(p.x[:120], p.y[:120])
    second = ffcp.RAPS(p.model, first.lam, first.kreg, seed=1)
    first.merge(second.calibrate(p.x[120:], p.y[120:]))
    return {**sets(first, p.new), **choice_values(first.choice)}


@case(AUTO, "ffraps_auto_size_save_and_load")
def _() -> Values:
    p = material.classification(rows=240)
    made = partial(ffcp.FFRAPS, p.model, tune="size", temperature="fit")
    fresh = through_file(made().calibrate(p.x, p.y), made())
    return {**sets(fresh, p.new), **settings(fresh), **choice_values(fresh.choice)}


@case(AUTO, "lac_auto_temperature_state_dict")
def _() -> Values:
    p = material.classification(rows=240, hotter=1.6)
    made = partial(ffcp.LAC, p.model, temperature="fit")
    fresh = through_state(made().calibrate(p.x, p.y), made())
    return {**sets(fresh, p.new), **settings(fresh), **choice_values(fresh.choice)}


@case(AUTO, "raps_auto_size_long_stream_that_stops_tuning")
def _() -> Values:
    p = material.classification(rows=54_000)
    predictor = ffcp.RAPS(p.model, tune="size").calibrate(material.pieces(p.x, p.y, 9000))
    return {**sets(predictor, p.new), **choice_values(predictor.choice)}
