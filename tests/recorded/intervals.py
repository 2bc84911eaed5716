"""CP, FFCP, CQR and FFCQR."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

import ffcp
from tests.recorded import material, shared
from tests.recorded.material import Problem
from tests.recorded.recording import Values, case, warned
from tests.recorded.shared import Subject, choice_values, close, ends, intervals_of

FIXED, AUTO = "intervals", "intervals_auto"
JOINTS = (False, True, 0.75, "bonferroni")


def _ffcp(model: nn.Module, **options: Any) -> ffcp.FFCP:
    return ffcp.FFCP(model, **{"feature": "0", **options})


def _ffcqr(model: nn.Module, **options: Any) -> ffcp.FFCQR:
    return ffcp.FFCQR(model, **{"feature": "0", **options})


SUBJECTS = (
    Subject("cp", FIXED, ffcp.CP),
    Subject("ffcp", FIXED, _ffcp),
    Subject("cqr", FIXED, ffcp.CQR, quantiles=True),
    Subject("ffcqr", FIXED, _ffcqr, quantiles=True),
)
GRADIENT = SUBJECTS[1], SUBJECTS[3]

for _subject in SUBJECTS:
    shared.register_common(_subject, joints=JOINTS)
    shared.register_groups(_subject)
    _subject.case("groups_joint_true", shared.groups_joint)
    for _joint in JOINTS:
        _subject.case(f"missing_joint_{str(_joint).lower()}", shared.missing, _joint)


# -- plain methods -----------------------------------------------------------------------------


@case(FIXED, "cp_merge_and_update_of_an_empty_one")
def _() -> Values:
    p = material.regression()
    merged = ffcp.CP(p.model).merge(ffcp.CP(p.model).calibrate(p.x, p.y))
    updated = ffcp.CP(p.model).calibrate(p.x, p.y, update=True)
    same = torch.equal(ends(merged, p.new), ends(updated, p.new))
    return {**intervals_of(merged, p.new), "same": same}


@case(FIXED, "cp_alphas_of_all_kinds")
def _() -> Values:
    p = material.regression()
    kinds = (Fraction(1, 7), Decimal("0.07"), torch.tensor(0.4, dtype=torch.float64), 0.02, 0.7)
    predictor = ffcp.CP(p.model).calibrate(p.x, p.y)
    return {str(alpha): ends(predictor, p.new, alpha) for alpha in kinds}


@case(FIXED, "cp_nested_lists")
def _() -> Values:
    p = material.regression()
    predictor = ffcp.CP(p.model).calibrate(p.x.tolist(), p.y.tolist())
    return intervals_of(predictor, p.new.tolist())


@case(FIXED, "cp_output_without_columns")
def _() -> Values:
    p = material.regression(model=nn.Sequential(*material.net(), nn.Flatten(1)))
    model = nn.Sequential(*p.model, nn.Flatten(0))
    return intervals_of(ffcp.CP(model).calibrate(p.x, p.y), p.new)


@case(FIXED, "cp_target_in_a_column")
def _() -> Values:
    p = material.regression()
    return intervals_of(ffcp.CP(p.model).calibrate(p.x, p.y[:, None]), p.new)


@case(FIXED, "cp_maps")
def _() -> Values:
    p = material.maps()
    return intervals_of(ffcp.CP(p.model).calibrate(p.x, p.y), p.new[:1], (0.1,))


@case(FIXED, "cp_types_of_a_float32_model")
def _() -> Values:
    p = material.regression()
    predictor = ffcp.CP(p.model.float()).calibrate(p.x.float(), p.y.float())
    band = predictor.predict_interval(p.new.float())
    score = predictor.score(p.new.float(), p.new_y.float())
    return {"types": [str(t.dtype) for t in (*band, score)]}


@case(FIXED, "cqr_threshold_below_zero")
def _() -> Values:
    p = material.regression(quantiles=True)
    with torch.no_grad():
        p.model[5].bias += torch.tensor([-6.0, 6.0], dtype=torch.float64)
    found = intervals_of(ffcp.CQR(p.model).calibrate(p.x, p.y), p.new, (0.1, 0.9))
    steep = intervals_of(ffcp.FFCQR(p.model, "0").calibrate(p.x, p.y), p.new, (0.1, 0.9))
    return {**found, **{f"ffcqr {key}": value for key, value in steep.items()}}


# -- gradients ---------------------------------------------------------------------------------


def _with_options(subject: Subject, targets: int, options: dict[str, Any]) -> Values:
    p = subject.problem(targets)
    predictor = subject.make(p.model, **options).calibrate(p.x, p.y)
    found = intervals_of(predictor, p.new[:3])
    found["score"] = predictor.score(p.new[:3], p.new_y[:3])
    return {**found, "feature": predictor.feature}


for _subject in SUBJECTS:
    shared.register_structured(_subject, **({"feature": "a"} if _subject in GRADIENT else {}))

for _subject in GRADIENT:
    for _norm in (1, 2, math.inf):
        _subject.case(f"norm_{_norm}", _with_options, 1, {"norm": _norm})
    for _feature in ("input", "1", "3", "output"):
        _subject.case(f"feature_{_feature}", _with_options, 1, {"feature": _feature})
    for _name, _method in {
        "exact": "exact",
        "by_default": "auto",
        "sketch": ffcp.scales.Sketch(16, seed=3),
        "smooth": ffcp.scales.Smooth(0.2, samples=4, seed=5),
        "smooth_sketch": ffcp.scales.Smooth(0.2, samples=3, method=ffcp.scales.Sketch(8)),
    }.items():
        _subject.case(f"method_{_name}_of_vectors", _with_options, 3, {"method": _method})


def _dead(floor: float) -> Values:
    p = material.regression(model=material.dead_net())
    predictor = ffcp.FFCP(p.model, "0", floor=floor).calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new), "score": predictor.score(p.new, p.new_y)}


@case(FIXED, "ffcp_floor_small_dead_relu")
def _() -> Values:
    return _dead(1e-6)


@case(FIXED, "ffcp_floor_large_dead_relu")
def _() -> Values:
    return _dead(0.3)


@case(FIXED, "ffcp_smooth_dead_relu")
def _() -> Values:
    p = material.regression(model=material.dead_net())
    method = ffcp.scales.Smooth(0.5, samples=10)
    return intervals_of(ffcp.FFCP(p.model, "0", method=method).calibrate(p.x, p.y), p.new)


@case(FIXED, "ffcp_feature_module")
def _() -> Values:
    p = material.regression()
    predictor = ffcp.FFCP(p.model, p.model[3]).calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new), "feature": predictor.feature}


def _nested(feature: str) -> Values:
    p = material.regression(model=material.fill(material.Nested(), seed=10))
    predictor = ffcp.FFCP(p.model, feature).calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new), "feature": predictor.feature}


@case(FIXED, "ffcp_feature_nested_name")
def _() -> Values:
    return _nested("trunk.0")


@case(FIXED, "ffcp_feature_one_of_several_tensors")
def _() -> Values:
    return _nested("split[1]")


for _kind, _feature in (("dict", "input"), ("dict", "input[left]"), ("tuple", "input[1]")):
    GRADIENT[0].case(
        f"input_{_kind}_feature_{_feature}",
        partial(shared.structured, kind=_kind, feature=_feature),
    )


def _on_maps(options: dict[str, Any]) -> Values:
    p = material.maps()
    predictor = ffcp.FFCP(p.model, "0", **options).calibrate(p.x, p.y)
    return {"method": "FFCP", "every other column": ends(predictor, p.new[:1])[..., ::2]}


for _name, _options in {
    "method_by_default": {"method": "auto"},
    "method_exact": {"method": "exact"},
    "method_coloured": {"method": "coloured"},
    "method_coloured_norm_1": {"method": "coloured", "norm": 1},
    "method_coloured_norm_inf": {"method": "coloured", "norm": math.inf},
    "method_sketch": {"method": ffcp.scales.Sketch(8)},
    "joint_true": {"joint": True},
    "joint_0.75": {"joint": 0.75},
}.items():
    case(FIXED, f"ffcp_{_name}_of_maps")(lambda options=_options: _on_maps(options))


# -- the layer is chosen -----------------------------------------------------------------------


def _chosen(predictor: Any, p: Problem, **options: Any) -> Values:
    found = intervals_of(predictor, p.new, **options)
    return {**found, **choice_values(predictor.choice), "feature": predictor.feature}


@case(AUTO, "ffcp_auto_choose")
def _() -> Values:
    p = material.steep()
    return _chosen(ffcp.FFCP(p.model).calibrate(p.x, p.y), p)


@case(AUTO, "ffcp_auto_choose_among_a_list")
def _() -> Values:
    p = material.steep()
    predictor = ffcp.FFCP(p.model, ["0", p.model[3], "input"]).calibrate(p.x, p.y)
    return _chosen(predictor, p)


@case(AUTO, "ffcp_auto_choose_among_more_layers_than_are_tried")
def _() -> Values:
    deep = [layer for width in (3, 4, 4, 4, 4) for layer in (nn.Linear(width, 4), nn.Tanh())]
    model = material.fill(nn.Sequential(*deep, nn.Linear(4, 1)), seed=13)
    p = material.regression(model=model, rows=120)
    with warned() as names:
        predictor = ffcp.FFCP(p.model).calibrate(p.x, p.y)
    return {**_chosen(predictor, p), "warnings": names}


@case(AUTO, "ffcp_auto_choose_plain_cp_wins_warning")
def _() -> Values:
    p = material.flat()
    with warned() as names:
        predictor = ffcp.FFCP(p.model, ["0", "input"]).calibrate(p.x, p.y)
    return {**_chosen(predictor, p), "warnings": names}


@case(AUTO, "ffcp_auto_choose_options")
def _() -> Values:
    p = material.steep()
    predictor = ffcp.FFCP(p.model, norm=1, selection_fraction=0.4, selection_alpha=0.3, seed=7)
    return _chosen(predictor.calibrate(p.x, p.y), p)


@case(AUTO, "ffcp_auto_choose_loader_cuts")
def _() -> Values:
    p = material.steep()
    expected = ends(ffcp.FFCP(p.model).calibrate(p.x, p.y), p.new)
    found: Values = {"ends": expected}
    for cut in shared.CUTS:
        predictor = ffcp.FFCP(p.model).calibrate(material.pieces(p.x, p.y, cut))
        found[f"same in batches of {cut}"] = close(ends(predictor, p.new), expected)
        found[f"feature in batches of {cut}"] = predictor.feature
    return found


@case(AUTO, "ffcp_auto_choose_groups")
def _() -> Values:
    p = material.steep(rows=150)
    predictor = ffcp.FFCP(p.model).calibrate(p.x, p.y, groups=shared.three_groups(p.x))
    return _chosen(predictor, p, groups=shared.three_groups(p.new))


def _auto_joint(joint: Any) -> Values:
    p = material.steep(3, rows=150)
    predictor = ffcp.FFCP(p.model, joint=joint).calibrate(p.x, p.y)
    return _chosen(predictor, p._replace(new=p.new[:3]))


for _joint in JOINTS:
    case(AUTO, f"ffcp_auto_choose_joint_{str(_joint).lower()}")(
        lambda joint=_joint: _auto_joint(joint)
    )


@case(AUTO, "ffcp_auto_choose_dict_input")
def _() -> Values:
    model = material.fill(material.TwoInputs(), seed=9)
    p = material.regression(rows=120)
    x = {"left": p.x[:, :2], "right": p.x[:, 2:]}
    new = {"left": p.new[:, :2], "right": p.new[:, 2:]}
    with warned() as names:
        predictor = ffcp.FFCP(model).calibrate(x, p.y)
    found = {**intervals_of(predictor, new), **choice_values(predictor.choice)}
    return {**found, "warnings": names}


@case(AUTO, "ffcp_auto_choose_update")
def _() -> Values:
    p = material.steep()
    predictor = ffcp.FFCP(p.model).calibrate(p.x[:60], p.y[:60])
    return _chosen(predictor.calibrate(p.x[60:], p.y[60:], update=True), p)


@case(AUTO, "ffcp_auto_choose_merge_worker_with_that_layer")
def _() -> Values:
    p = material.steep()
    first = ffcp.FFCP(p.model).calibrate(p.x[:60], p.y[:60])
    second = ffcp.FFCP(p.model, first.feature).calibrate(p.x[60:], p.y[60:])
    return _chosen(first.merge(second), p)


@case(AUTO, "ffcp_auto_choose_save_and_load")
def _() -> Values:
    p = material.steep()
    predictor = ffcp.FFCP(p.model).calibrate(p.x, p.y)
    return _chosen(shared.through_file(predictor, ffcp.FFCP(p.model)), p)


@case(AUTO, "ffcp_auto_choose_state_dict")
def _() -> Values:
    p = material.steep()
    predictor = ffcp.FFCP(p.model).calibrate(p.x, p.y)
    return _chosen(shared.through_state(predictor, ffcp.FFCP(p.model)), p)


@case(AUTO, "ffcqr_auto_choose")
def _() -> Values:
    p = material.steep(quantiles=True)
    return _chosen(ffcp.FFCQR(p.model).calibrate(p.x, p.y), p)


@case(AUTO, "ffcqr_auto_choose_among_a_list_joint_true")
def _() -> Values:
    p = material.steep(3, quantiles=True, rows=150)
    with warned() as names:
        predictor = ffcp.FFCQR(p.model, ["0", "3"], joint=True).calibrate(p.x, p.y)
    return {**_chosen(predictor, p._replace(new=p.new[:3])), "warnings": names}


@case(AUTO, "ffcqr_auto_choose_save_and_load")
def _() -> Values:
    p = material.steep(quantiles=True)
    predictor = ffcp.FFCQR(p.model).calibrate(p.x, p.y)
    return _chosen(shared.through_file(predictor, ffcp.FFCQR(p.model)), p)


@case(AUTO, "ffcp_auto_choose_long_stream_that_stops_choosing")
def _() -> Values:
    p = material.steep(rows=60_000)
    predictor = ffcp.FFCP(p.model, ["0", "3"]).calibrate(material.pieces(p.x, p.y, 8000))
    whole = ffcp.FFCP(p.model, ["0", "3"]).calibrate(p.x, p.y)
    return {**_chosen(predictor, p), "rows that choose of arrays": whole.choice.rows}
