"""LCP, FFLCP, LCQR and FFLCQR."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ffcp
from ffcp.kernels import Localizer
from tests.recorded import material, shared
from tests.recorded.recording import Values, case, warned
from tests.recorded.shared import Subject, choice_values, close, ends, intervals_of

FIXED, AUTO = "localized", "localized_auto"
# Wide enough that 100 points leave no band infinite.
WIDTHS = {"gaussian": 1.0, "laplace": 1.2, "box": 1.5, "nearest": 45}


def first_input(x: Tensor) -> Tensor:
    """Embed by the first input alone."""
    return x[:, :1]


def _lcp(model: nn.Module, localizer: Any = None, **options: Any) -> ffcp.LCP:
    return ffcp.LCP(model, localizer or Localizer("gaussian", bandwidth=1.5), **options)


def _fflcp(model: nn.Module, localizer: Any = None, **options: Any) -> ffcp.FFLCP:
    localizer = localizer or Localizer("laplace", bandwidth=2.0)
    return ffcp.FFLCP(model, options.pop("feature", "0"), localizer, **options)


def _lcqr(model: nn.Module, localizer: Any = None, **options: Any) -> ffcp.LCQR:
    return ffcp.LCQR(model, localizer or Localizer("box", bandwidth=4.0), **options)


def _fflcqr(model: nn.Module, localizer: Any = None, **options: Any) -> ffcp.FFLCQR:
    localizer = localizer or Localizer("gaussian", bandwidth=2.0)
    return ffcp.FFLCQR(model, options.pop("feature", "0"), localizer, **options)


SUBJECTS = (
    Subject("lcp", FIXED, _lcp),
    Subject("fflcp", FIXED, _fflcp),
    Subject("lcqr", FIXED, _lcqr, quantiles=True),
    Subject("fflcqr", FIXED, _fflcqr, quantiles=True),
)
LCP, FFLCP, LCQR, FFLCQR = SUBJECTS


# -- a given bandwidth -------------------------------------------------------------------------


def _with(subject: Subject, localizer: Localizer, options: dict[str, Any]) -> Values:
    p = subject.problem(rows=100)
    predictor = subject.make(p.model, localizer, **options).calibrate(p.x, p.y)
    found = intervals_of(predictor, p.new, (0.15, 0.4))
    found["score"] = predictor.score(p.new[:3], p.new_y[:3])
    return {**found, "bandwidth": predictor.bandwidth}


for _subject in SUBJECTS:
    shared.register_common(_subject, joints=(False, True, 0.75), few=False)
    for _on in ("input", "a"):
        _options = {"localizer": Localizer("gaussian", on=_on, bandwidth=3.0)}
        _options |= {"feature": "b"} if _subject in (FFLCP, FFLCQR) else {}
        for _kind in ("dict", "tuple", "one_dict"):
            _subject.case(
                f"input_{_kind}_on_{_on}", partial(shared.structured, kind=_kind, **_options)
            )
    for _kernel, _width in WIDTHS.items():
        for _guarantee in ("marginal", "level", "random", "none"):
            if (_kernel, _guarantee) == ("nearest", "random"):
                continue
            if (_guarantee == "level" and _subject is not LCP) or (
                _guarantee == "random" and _subject not in (LCP, FFLCP)
            ):
                continue
            _subject.case(
                f"{_kernel}_guarantee_{_guarantee}",
                _with,
                Localizer(_kernel, bandwidth=_width),
                {"guarantee": _guarantee},
            )
    for _on in ("input", "0", "3"):
        _subject.case(f"on_{_on}", _with, Localizer("gaussian", on=_on, bandwidth=2.5), {})
    _subject.case("nearest_on_input", _with, Localizer("nearest", on="input", bandwidth=50), {})
    _subject.case("on_function", _with, Localizer("laplace", on=first_input, bandwidth=1.0), {})

for _subject in (FFLCP, FFLCQR):
    _subject.case("on_feature", _with, Localizer("gaussian", on="feature", bandwidth=3.0), {})
    for _norm in (1, float("inf")):
        _subject.case(f"norm_{_norm}", _with, Localizer("box", bandwidth=2.5), {"norm": _norm})

LCP.case(
    "random_seed_5", _with, Localizer("box", bandwidth=2.0), {"guarantee": "random", "seed": 5}
)


@case(FIXED, "lcp_random_on_input_in_batches")
def _() -> Values:
    p = material.regression(rows=100)
    localizer = Localizer("laplace", on="input", bandwidth=1.5)
    whole = ffcp.LCP(p.model, localizer, guarantee="random").calibrate(p.x, p.y)
    parts = ffcp.LCP(p.model, localizer, guarantee="random", batch_size=2).calibrate(p.x, p.y)
    same = close(ends(whole, p.new, 0.3), ends(parts, p.new, 0.3))
    return {**intervals_of(whole, p.new, (0.3,)), "same in batches of 2": same}


@case(FIXED, "lcp_merge_and_update_of_an_empty_one")
def _() -> Values:
    p = material.regression()
    merged = _lcp(p.model).merge(_lcp(p.model).calibrate(p.x, p.y))
    updated = _lcp(p.model).calibrate(p.x, p.y, update=True)
    same = torch.equal(ends(merged, p.new), ends(updated, p.new))
    return {**intervals_of(merged, p.new), "same": same}


@case(FIXED, "lcp_more_points_than_set_the_level")
def _() -> Values:
    p = material.regression(rows=6000)
    found: Values = {}
    for kernel, width in {"gaussian": 0.3, "nearest": 300}.items():
        predictor = ffcp.LCP(p.model, Localizer(kernel, bandwidth=width)).calibrate(p.x, p.y)
        found[kernel] = ends(predictor, p.new)
    return found


@case(FIXED, "lcp_points_at_the_same_place")
def _() -> Values:
    p = material.regression(rows=100)
    x = p.x.round()
    localizer = Localizer("nearest", on="input", bandwidth=30)
    return intervals_of(ffcp.LCP(p.model, localizer).calibrate(x, p.y), p.new.round(), (0.2,))


@case(FIXED, "lcp_maps_joint_true")
def _() -> Values:
    p = material.maps(rows=60)
    localizer = Localizer("nearest", on="input", bandwidth=30)
    predictor = ffcp.LCP(p.model, localizer, joint=True).calibrate(p.x, p.y)
    return intervals_of(predictor, p.new[:1], (0.2,))


@case(FIXED, "fflcp_method_sketch")
def _() -> Values:
    p = material.regression(3, rows=100)
    localizer = Localizer("gaussian", bandwidth=2.0)
    predictor = ffcp.FFLCP(p.model, "0", localizer, method=ffcp.scales.Sketch(8), floor=0.2)
    return intervals_of(predictor.calibrate(p.x, p.y), p.new[:4])


def _thin(subject: Subject, localizer: Localizer, guarantee: str) -> Values:
    """Bands that are infinite where too few points are near, and the advice on it."""
    p = subject.problem(rows=100)
    predictor = subject.make(p.model, localizer, guarantee=guarantee).calibrate(p.x, p.y)
    with warned() as names:
        found = intervals_of(predictor, 1.5 * p.new, (0.2,))
    return {**found, "warnings": names}


for _subject in SUBJECTS:
    for _kernel, _width in {"gaussian": 0.7, "box": 1.4, "nearest": 3}.items():
        _subject.case(
            f"{_kernel}_too_narrow_warning", _thin, Localizer(_kernel, "input", _width), "level"
        )
LCP.case("too_narrow_without_guarantee_warning", _thin, Localizer("laplace", "input", 0.7), "none")


@case(FIXED, "lcp_too_few_points_warning")
def _() -> Values:
    p = material.regression(rows=8)
    predictor = ffcp.LCP(p.model, Localizer("gaussian", bandwidth=1.0)).calibrate(p.x, p.y)
    with warned() as names:
        found = intervals_of(predictor, p.new, (0.1,))
    return {**found, "warnings": names}


@case(FIXED, "lcp_bandwidth_for")
def _() -> Values:
    p = material.regression(rows=100)
    found: Values = {}
    for kernel, guarantee in (("gaussian", "level"), ("box", "none"), ("nearest", "level")):
        localizer = Localizer(kernel, on="input", bandwidth=5 if kernel == "nearest" else 0.3)
        predictor = ffcp.LCP(p.model, localizer, guarantee=guarantee).calibrate(p.x, p.y)
        for alpha in (0.1, 0.3, 0.001):
            wide = predictor.bandwidth_for(p.new.float(), alpha)
            found[f"{kernel} {guarantee} at {alpha}"] = wide
    return found


# -- a bandwidth that is chosen ----------------------------------------------------------------


def _choice(predictor: Any) -> Values:
    choice = predictor.bandwidth_choice
    return {
        "bandwidth": predictor.bandwidth,
        "chosen": choice.bandwidth,
        "choosing rows": choice.rows,
        "choosing alpha": choice.alpha,
        "narrowest and widest": [choice.trials[0].bandwidth, choice.trials[-1].bandwidth],
        "losses": [trial.loss for trial in choice.trials],
        "infinite": [trial.infinite for trial in choice.trials],
    }


def _auto(subject: Subject, localizer: Localizer | str, options: dict[str, Any]) -> Values:
    p = subject.problem(rows=160)
    predictor = subject.make(p.model, localizer, **options).calibrate(p.x, p.y)
    with warned() as names:
        found = intervals_of(predictor, p.new, (0.15, 0.4))
    return {**found, **_choice(predictor), "warnings": names}


for _subject in (
    Subject("lcp", AUTO, _lcp),
    Subject("fflcp", AUTO, _fflcp),
    Subject("lcqr", AUTO, _lcqr, quantiles=True),
    Subject("fflcqr", AUTO, _fflcqr, quantiles=True),
):
    for _kernel in WIDTHS:
        _subject.case(f"auto_bandwidth_{_kernel}", _auto, _kernel, {})
    _subject.case("auto_bandwidth_on_input", _auto, Localizer("gaussian", on="input"), {})
    _subject.case(
        "auto_bandwidth_options",
        _auto,
        Localizer("box", on=first_input),
        {"selection_fraction": 0.4, "selection_alpha": 0.3, "seed": 4, "guarantee": "none"},
    )

Subject("lcp", AUTO, _lcp).case(
    "auto_bandwidth_guarantee_random", _auto, "gaussian", {"guarantee": "random"}
)
Subject("fflcp", AUTO, _fflcp).case(
    "auto_bandwidth_on_feature", _auto, Localizer("laplace", on="feature"), {}
)


@case(AUTO, "lcp_auto_bandwidth_loader_cuts")
def _() -> Values:
    p = material.regression(rows=160)
    predictor = ffcp.LCP(p.model, "gaussian").calibrate(p.x, p.y)
    expected = ends(predictor, p.new, 0.2)
    found: Values = {"ends": expected, **_choice(predictor)}
    for cut in shared.CUTS:
        cut_up = ffcp.LCP(p.model, "gaussian").calibrate(material.pieces(p.x, p.y, cut))
        found[f"same in batches of {cut}"] = close(ends(cut_up, p.new, 0.2), expected)
    return found


@case(AUTO, "lcp_auto_bandwidth_joint_true")
def _() -> Values:
    p = material.regression(3, rows=160)
    predictor = ffcp.LCP(p.model, "nearest", joint=True).calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new[:4], (0.2,)), **_choice(predictor)}


@case(AUTO, "lcp_auto_bandwidth_several_outputs")
def _() -> Values:
    p = material.regression(3, rows=160)
    predictor = ffcp.LCP(p.model, "gaussian").calibrate(p.x, p.y)
    with warned() as names:
        found = intervals_of(predictor, p.new[:4], (0.2,))
    return {**found, **_choice(predictor), "warnings": names}


@case(AUTO, "lcp_auto_bandwidth_more_points_than_choose")
def _() -> Values:
    p = material.regression(rows=11_000)
    predictor = ffcp.LCP(p.model, "gaussian").calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new, (0.2,)), **_choice(predictor)}


@case(AUTO, "lcp_auto_bandwidth_update")
def _() -> Values:
    p = material.regression(rows=160)
    predictor = ffcp.LCP(p.model, "gaussian").calibrate(p.x[:90], p.y[:90])
    predictor.calibrate(p.x[90:], p.y[90:], update=True)
    return {**intervals_of(predictor, p.new, (0.2,)), **_choice(predictor)}


@case(AUTO, "lcp_auto_bandwidth_save_and_load")
def _() -> Values:
    p = material.regression(rows=160)
    predictor = ffcp.LCP(p.model, "gaussian").calibrate(p.x, p.y)
    fresh = shared.through_file(predictor, ffcp.LCP(p.model, "gaussian"))
    return {**intervals_of(fresh, p.new, (0.2,)), **_choice(fresh)}


@case(AUTO, "lcp_auto_bandwidth_state_dict")
def _() -> Values:
    p = material.regression(rows=160)
    predictor = ffcp.LCP(p.model, "gaussian").calibrate(p.x, p.y)
    fresh = shared.through_state(predictor, ffcp.LCP(p.model, "gaussian"))
    return {**intervals_of(fresh, p.new, (0.2,)), **_choice(fresh)}


def _fitted(predictor: Any, rows: int = 100, planned: int | None = None, **problem: Any) -> Values:
    """Choose the bandwidth on points of their own; all others calibrate."""
    p = problem["p"]
    predictor.fit_localizer(p.x[rows:], p.y[rows:], planned)
    found = _choice(predictor)
    predictor.calibrate(p.x[:rows], p.y[:rows])
    with warned() as names:
        found |= intervals_of(predictor, p.new, (0.15, 0.4))
    return {**found, "warnings": names}


@case(AUTO, "lcp_auto_fit_localizer")
def _() -> Values:
    p = material.regression(rows=160)
    return _fitted(ffcp.LCP(p.model, "gaussian"), p=p)


@case(AUTO, "lcp_auto_fit_localizer_planned")
def _() -> Values:
    p = material.regression(rows=160)
    return _fitted(ffcp.LCP(p.model, "nearest"), planned=100, p=p)


@case(AUTO, "fflcp_auto_fit_localizer")
def _() -> Values:
    p = material.regression(rows=160)
    return _fitted(ffcp.FFLCP(p.model, "0", Localizer("box", on="feature")), p=p)


@case(AUTO, "lcqr_auto_fit_localizer")
def _() -> Values:
    p = material.regression(rows=160, quantiles=True)
    return _fitted(ffcp.LCQR(p.model, "laplace"), p=p)


@case(AUTO, "fflcqr_auto_fit_localizer")
def _() -> Values:
    p = material.regression(rows=160, quantiles=True)
    return _fitted(ffcp.FFLCQR(p.model, "0", "nearest"), p=p)


# -- a layer that is chosen --------------------------------------------------------------------


def _layer(make: Any, quantiles: bool, localizer: Any, options: dict[str, Any]) -> Values:
    p = material.steep(quantiles=quantiles, rows=200)
    with warned() as names:
        predictor = make(p.model, ["0", "3", "input"], localizer, **options).calibrate(p.x, p.y)
        found = intervals_of(predictor, p.new, (0.15, 0.4))
    found |= {**choice_values(predictor.choice), "feature": predictor.feature, "warnings": names}
    if predictor.bandwidth_choice is not None:
        found |= {f"localizer {key}": value for key, value in _choice(predictor).items()}
    return found


for _name, _make, _quantiles in (("fflcp", ffcp.FFLCP, False), ("fflcqr", ffcp.FFLCQR, True)):
    case(AUTO, f"{_name}_auto_choose_bandwidth_given")(
        lambda make=_make, q=_quantiles: _layer(make, q, Localizer("gaussian", bandwidth=2.0), {})
    )
    case(AUTO, f"{_name}_auto_both")(
        lambda make=_make, q=_quantiles: _layer(make, q, "gaussian", {})
    )
    case(AUTO, f"{_name}_auto_both_options")(
        lambda make=_make, q=_quantiles: _layer(
            make, q, "nearest", {"selection_fraction": 0.3, "selection_alpha": 0.2, "seed": 9}
        )
    )


@case(AUTO, "fflcp_auto_both_all_layers_save_and_load")
def _() -> Values:
    p = material.steep(rows=200)
    with warned() as names:
        predictor = ffcp.FFLCP(p.model, "auto", "gaussian").calibrate(p.x, p.y)
    fresh = shared.through_file(predictor, ffcp.FFLCP(p.model, "auto", "gaussian"))
    same = torch.equal(ends(fresh, p.new, 0.2), ends(predictor, p.new, 0.2))
    found = {**intervals_of(fresh, p.new, (0.2,)), **choice_values(fresh.choice), "same": same}
    found |= {f"localizer {key}": value for key, value in _choice(fresh).items()}
    return {**found, "warnings": names}
