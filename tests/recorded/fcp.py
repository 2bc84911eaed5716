"""FCP and FCQR."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

import ffcp
from tests.recorded import material, shared
from tests.recorded.material import Problem
from tests.recorded.recording import Values, case, warned
from tests.recorded.shared import Subject, close, ends, intervals_of

FIXED, AUTO = "fcp", "fcp_auto"


def _fcp(model: nn.Module, **options: Any) -> ffcp.FCP:
    return ffcp.FCP(model, "0", **{"steps": 6, "lr": 0.05, **options})


def _fcp_exact(model: nn.Module, **options: Any) -> ffcp.FCP:
    return ffcp.FCP(model, "3", invert="exact", **options)


def _fcqr(model: nn.Module, **options: Any) -> ffcp.FCQR:
    return ffcp.FCQR(model, "0", **{"steps": 6, "lr": 0.05, **options})


def _fcqr_exact(model: nn.Module, **options: Any) -> ffcp.FCQR:
    return ffcp.FCQR(model, "3", invert="exact", **options)


SUBJECTS = (
    Subject("fcp_descent", FIXED, _fcp),
    Subject("fcp_exact", FIXED, _fcp_exact),
    Subject("fcqr_descent", FIXED, _fcqr, quantiles=True),
    Subject("fcqr_exact", FIXED, _fcqr_exact, quantiles=True),
)
DESCENT, EXACT = SUBJECTS[:2]


def _coverages(predictor: Any, p: Problem) -> Values:
    found = {}
    for alpha in shared.ALPHAS:
        share = predictor.feature_coverage(p.x, p.y, alpha)
        found[f"feature coverage at {alpha}"] = [float(share), share.low, share.high, share.rows]
    return found


def _with(subject: Subject, options: dict[str, Any]) -> Values:
    p = subject.problem(rows=70)
    predictor = subject.make(p.model, **options).calibrate(p.x, p.y)
    scores = predictor.score(p.new[:3], p.new_y[:3])
    found = {**intervals_of(predictor, p.new[:4]), **_coverages(predictor, p), "score": scores}
    return {**found, "steps": predictor.steps, "unconverged": predictor.unconverged}


for _subject in SUBJECTS:
    shared.register_common(_subject)
    for _norm, _bound in itertools.product((2, math.inf), ("ibp", "crown")):
        _subject.case(f"norm_{_norm}_{_bound}", _with, {"norm": _norm, "bound": _bound})
for _subject in (SUBJECTS[0], SUBJECTS[2]):
    for _norm in (2, math.inf):
        _subject.case(f"adam_norm_{_norm}", _with, {"optimizer": "adam", "norm": _norm})
    _subject.case("one_step", _with, {"steps": 1})
    _subject.case("many_steps_crown", _with, {"steps": 60, "lr": 0.01, "bound": "crown"})

for _joint in (False, True, "bonferroni"):
    DESCENT.case(f"joint_{str(_joint).lower()}", shared.joint, _joint)
    DESCENT.case(f"missing_joint_{str(_joint).lower()}", shared.missing, _joint)
for _joint in (False, True, 0.75, "bonferroni"):
    EXACT.case(f"joint_{str(_joint).lower()}", shared.joint, _joint)
EXACT.case("missing_joint_false", shared.missing, False)
EXACT.case("missing_joint_0.75", shared.missing, 0.75)

shared.register_groups(DESCENT)
SUBJECTS[2].case("groups_labels", shared.groups_labels)


@case(FIXED, "fcp_bonferroni_feature_coverage")
def _() -> Values:
    p = material.regression(4, rows=90)
    return _coverages(_fcp(p.model, joint="bonferroni").calibrate(p.x, p.y), p)


@case(FIXED, "fcp_feature_input")
def _() -> Values:
    p = material.regression(rows=70)
    predictor = ffcp.FCP(p.model, "input", steps=4, lr=0.05, bound="crown").calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new), "feature": predictor.feature}


@case(FIXED, "fcp_head_given")
def _() -> Values:
    p = material.regression(rows=70)
    head = p.model[4:]
    predictor = ffcp.FCP(p.model, p.model[3], head=head, steps=4, lr=0.05).calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new), "feature": predictor.feature}


class _Forward(nn.Module):
    """A model whose head is read out of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.side, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.trunk(x)
        return self.out(torch.relu(self.side(v)) + 0.5 * v)


@case(FIXED, "fcp_head_read_from_a_forward_pass")
def _() -> Values:
    p = material.regression(model=material.fill(_Forward(), seed=18), rows=70)
    found: Values = {}
    for bound in ("ibp", "crown"):
        predictor = ffcp.FCP(p.model, "trunk", bound=bound, steps=5, lr=0.05)
        found[bound] = ends(predictor.calibrate(p.x, p.y), p.new)
    return found


@case(FIXED, "fcp_head_of_nested_sequentials")
def _() -> Values:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    model = material.fill(nn.Sequential(inner, nn.SiLU(), nn.Linear(4, 1)), seed=19)
    p = material.regression(model=model, rows=70)
    return intervals_of(ffcp.FCP(model, "0.1", steps=5, lr=0.05).calibrate(p.x, p.y), p.new)


@case(FIXED, "fcp_maps_joint_true")
def _() -> Values:
    p = material.maps(rows=30)
    predictor = ffcp.FCP(p.model, "0", joint=True, steps=3, lr=0.02).calibrate(p.x, p.y)
    return intervals_of(predictor, p.new[:1], (0.1,))


@case(FIXED, "fcp_exact_targets_out_of_reach_warning")
def _() -> Values:
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Tanh()]
    model = material.fill(nn.Sequential(*layers), seed=14)
    p = material.regression(model=model, rows=70)
    y = (p.y / 4).clamp(-0.9, 0.9)
    y[[5, 40]] = torch.tensor([1.5, -2.0], dtype=torch.float64)  # the model ends in tanh
    with warned() as names:
        predictor = ffcp.FCP(model, "0", invert="exact").calibrate(p.x, y)
    found = intervals_of(predictor, p.new)
    return {**found, "unconverged": predictor.unconverged, "warnings": names}


# -- the number of steps is chosen -------------------------------------------------------------


def _steps(predictor: Any) -> Values:
    covered = predictor.step_coverage
    return {
        "steps": predictor.steps,
        "steps tried": list(covered),
        "coverage of steps": list(covered.values()),
    }


def _auto(make: Any, quantiles: bool, targets: int, options: dict[str, Any]) -> Values:
    p = material.regression(targets, quantiles=quantiles, rows=100)
    predictor = make(p.model, "0", **{"lr": 0.1, **options}).calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new[:3]), **_steps(predictor)}


for _name, _make, _quantiles, _targets, _options in (
    ("fcp_auto_steps", ffcp.FCP, False, 1, {}),
    ("fcp_auto_steps_crown_norm_2", ffcp.FCP, False, 1, {"bound": "crown", "norm": 2}),
    ("fcp_auto_steps_adam", ffcp.FCP, False, 1, {"optimizer": "adam", "bound": "crown"}),
    (
        "fcp_auto_steps_options",
        ffcp.FCP,
        False,
        1,
        {"selection_fraction": 0.4, "selection_alpha": 0.3, "seed": 3, "bound": "crown"},
    ),
    ("fcp_auto_steps_joint_false", ffcp.FCP, False, 2, {"bound": "crown"}),
    ("fcp_auto_steps_joint_true", ffcp.FCP, False, 2, {"joint": True, "bound": "crown"}),
    ("fcp_auto_steps_joint_bonferroni", ffcp.FCP, False, 2, {"joint": "bonferroni"}),
    ("fcp_auto_steps_never_enough", ffcp.FCP, False, 1, {"lr": 1e-4, "bound": "crown"}),
    ("fcqr_auto_steps", ffcp.FCQR, True, 1, {}),
    ("fcqr_auto_steps_crown", ffcp.FCQR, True, 1, {"bound": "crown"}),
):
    case(AUTO, _name)(
        lambda make=_make, q=_quantiles, t=_targets, options=_options: _auto(make, q, t, options)
    )


def _searching(model: nn.Module) -> ffcp.FCP:
    return ffcp.FCP(model, "0", lr=0.1, bound="crown")


@case(AUTO, "fcp_auto_steps_loader_cuts")
def _() -> Values:
    p = material.regression(rows=80)
    predictor = _searching(p.model).calibrate(p.x, p.y)
    expected = ends(predictor, p.new)
    found: Values = {"ends": expected, **_steps(predictor)}
    for cut in (9, 32):
        cut_up = _searching(p.model).calibrate(material.pieces(p.x, p.y, cut))
        found[f"same in batches of {cut}"] = close(ends(cut_up, p.new), expected)
    return found


@case(AUTO, "fcp_auto_steps_groups")
def _() -> Values:
    p = material.regression(rows=120)
    predictor = _searching(p.model).calibrate(p.x, p.y, groups=shared.three_groups(p.x))
    return {
        **intervals_of(predictor, p.new, groups=shared.three_groups(p.new)),
        **_steps(predictor),
    }


@case(AUTO, "fcp_auto_steps_missing")
def _() -> Values:
    p = material.regression(2, rows=80)
    y = p.y.masked_fill(material.uniform(*p.y.shape, seed=31) < 0.2, torch.nan)
    predictor = ffcp.FCP(p.model, "0", lr=0.1, bound="crown", missing=True).calibrate(p.x, y)
    return {**intervals_of(predictor, p.new[:4]), **_steps(predictor)}


@case(AUTO, "fcp_auto_steps_update")
def _() -> Values:
    p = material.regression(rows=100)
    predictor = _searching(p.model).calibrate(p.x[:60], p.y[:60])
    predictor.calibrate(p.x[60:], p.y[60:], update=True)
    return {**intervals_of(predictor, p.new), **_steps(predictor)}


@case(AUTO, "fcp_auto_steps_merge_worker_with_that_number")
def _() -> Values:
    p = material.regression(rows=100)
    first = _searching(p.model).calibrate(p.x[:60], p.y[:60])
    second = ffcp.FCP(p.model, "0", lr=0.1, bound="crown", steps=first.steps)
    first.merge(second.calibrate(p.x[60:], p.y[60:]))
    return {**intervals_of(first, p.new), **_steps(first)}


@case(AUTO, "fcp_auto_steps_save_and_load")
def _() -> Values:
    p = material.regression(rows=100)
    predictor = _searching(p.model).calibrate(p.x, p.y)
    fresh = shared.through_file(predictor, _searching(p.model))
    return {**intervals_of(fresh, p.new), "steps": fresh.steps}


@case(AUTO, "fcp_auto_steps_long_stream_that_stops_choosing")
def _() -> Values:
    p = material.regression(rows=6000)
    predictor = ffcp.FCP(p.model, "3", lr=0.1).calibrate(material.pieces(p.x, p.y, 1000))
    return {**intervals_of(predictor, p.new), **_steps(predictor)}
