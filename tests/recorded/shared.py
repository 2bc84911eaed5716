"""Cases that many band methods have in common, and how bands become values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.recorded import material
from tests.recorded.material import Problem
from tests.recorded.recording import Values, case, warned

ALPHAS = (0.1, 0.3)
CUTS = (1, 7, 32)


def intervals_of(predictor: Any, x: Any, alphas: Sequence[Any] = ALPHAS, **options: Any) -> Values:
    """Give the ends of the bands at several levels."""
    found: Values = {"method": type(predictor).__name__}
    for alpha in alphas:
        band = predictor.predict_interval(x, alpha, **options)
        found[f"lower at {alpha}"], found[f"upper at {alpha}"] = band.lower, band.upper
    return found


def ends(predictor: Any, x: Any, alpha: Any = 0.1, **options: Any) -> Tensor:
    """Lower and upper ends in one tensor."""
    band = predictor.predict_interval(x, alpha, **options)
    return torch.stack([band.lower, band.upper])


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two results are the same up to rounding."""
    return bool(torch.allclose(one, other, rtol=1e-11, atol=1e-11, equal_nan=True))


def through_file(predictor: Any, fresh: Any) -> Any:
    """Save a calibration and load it into another predictor."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.safetensors"
        predictor.save(path)
        return fresh.load(path)


def through_state(predictor: Any, fresh: Any) -> Any:
    """Hand a calibration on by state_dict."""
    fresh.load_state_dict(predictor.state_dict())
    return fresh


def choice_values(choice: Any) -> Values:
    """Flatten what the automatic choice of a layer saw and took."""
    found: Values = {
        "chosen": choice.feature,
        "choosing rows": choice.rows,
        "choosing alpha": choice.alpha,
        "candidates": list(choice.candidates),
    }
    for name, candidate in choice.candidates.items():
        found[f"mean length of {name}"] = candidate.mean_length
        found[f"rank correlation of {name}"] = candidate.rank_correlation
    return found


def three_groups(x: Tensor) -> list[str]:
    """Name the group of each row by its second input."""
    return [("low", "middle", "high")[int(v > -0.4) + int(v > 0.5)] for v in x[:, 1]]


@dataclass(frozen=True)
class Subject:
    """A method under test: its name in cases, its family, and how it is built of a model."""

    name: str
    family: str
    make: Callable[..., Any]
    quantiles: bool = False

    def problem(self, targets: int = 1, **options: Any) -> Problem:
        """Give a model for this method, and data."""
        return material.regression(targets, quantiles=self.quantiles, **options)

    def case(self, what: str, function: Callable[..., Values], *args: Any) -> None:
        """Register a case of this method."""
        case(self.family, f"{self.name}_{what}")(partial(function, self, *args))


# -- ways to calibrate -------------------------------------------------------------------------


def arrays(subject: Subject) -> Values:
    p = subject.problem()
    predictor = subject.make(p.model).calibrate(p.x, p.y)
    found = intervals_of(predictor, p.new, (0.05, 0.1, 0.25, 0.5))
    found["score"] = predictor.score(p.new, p.new_y)
    return {**found, "prediction": predictor.predict_interval(p.new).prediction}


def numpy_arrays(subject: Subject) -> Values:
    p = subject.problem()
    predictor = subject.make(p.model, batch_size=13).calibrate(p.x.numpy(), p.y.numpy())
    expected = subject.make(p.model).calibrate(p.x, p.y)
    found = ends(predictor, p.new.numpy())
    return {"same as tensors": close(found, ends(expected, p.new))}


def loader_cuts(subject: Subject) -> Values:
    p = subject.problem()
    expected = ends(subject.make(p.model).calibrate(p.x, p.y), p.new)
    found: Values = {}
    for cut in CUTS:
        predictor = subject.make(p.model).calibrate(material.pieces(p.x, p.y, cut))
        found[f"same in batches of {cut}"] = close(ends(predictor, p.new), expected)
    return found


def too_few_points(subject: Subject) -> Values:
    p = subject.problem(rows=8)
    predictor = subject.make(p.model).calibrate(p.x, p.y)
    with warned() as names:
        found = intervals_of(predictor, p.new, (0.1,))
    return {**found, "warnings": names}


# -- more data ---------------------------------------------------------------------------------


def update(subject: Subject) -> Values:
    p = subject.problem()
    predictor = subject.make(p.model).calibrate(p.x[:40], p.y[:40])
    before = ends(predictor, p.new)
    predictor.calibrate(p.x[40:], p.y[40:], update=True)
    return {"before": before, **intervals_of(predictor, p.new)}


def merge(subject: Subject) -> Values:
    p = subject.problem()
    first, second = subject.make(p.model), subject.make(p.model)
    first.calibrate(p.x[:35], p.y[:35])
    second.calibrate(p.x[35:], p.y[35:])
    whole = subject.make(p.model).calibrate(p.x, p.y)
    found = intervals_of(first.merge(second), p.new)
    return {**found, "same as one": close(ends(first, p.new), ends(whole, p.new))}


def handed_on(subject: Subject, how: Callable[[Any, Any], Any]) -> Values:
    p = subject.problem()
    predictor = subject.make(p.model).calibrate(p.x, p.y)
    fresh = how(predictor, subject.make(p.model))
    same = torch.equal(ends(fresh, p.new), ends(predictor, p.new))
    return {**intervals_of(fresh, p.new, (0.3,)), "same": same}


# -- options -----------------------------------------------------------------------------------


def joint(subject: Subject, value: Any) -> Values:
    p = subject.problem(4)
    predictor = subject.make(p.model, joint=value).calibrate(p.x, p.y)
    return {**intervals_of(predictor, p.new[:2]), "score": predictor.score(p.new[:3], p.new_y[:3])}


def missing(subject: Subject, value: Any) -> Values:
    p = subject.problem(4)
    gone = material.uniform(*p.y.shape, seed=31) < 0.2
    y = p.y.masked_fill(gone, torch.nan)
    new_y = p.new_y.masked_fill(p.new_y > 1, torch.nan)
    # What was recorded first is about known outputs, which is now said so.
    asked = {True: "known", 0.75: (0.75, "known")}.get(value, value)
    predictor = subject.make(p.model, joint=asked, missing=True).calibrate(p.x, y)
    return {**intervals_of(predictor, p.new[:2]), "score": predictor.score(p.new[:3], new_y[:3])}


def groups_labels(subject: Subject) -> Values:
    p = subject.problem()
    predictor = subject.make(p.model).calibrate(p.x, p.y, groups=three_groups(p.x))
    return intervals_of(predictor, p.new, groups=three_groups(p.new))


def groups_numbers(subject: Subject) -> Values:
    p = subject.problem()
    labels = (p.x[:, 1] > 0).long()
    predictor = subject.make(p.model).calibrate(p.x, p.y, groups=labels)
    return intervals_of(predictor, p.new, groups=(p.new[:, 1] > 0).long().numpy())


def groups_function(subject: Subject) -> Values:
    p = subject.problem()
    predictor = subject.make(p.model).calibrate(
        material.pieces(p.x, p.y, 7), groups=lambda x: x[:, 0] > 0
    )
    return intervals_of(predictor, p.new, groups=lambda x: x[:, 0] > 0)


def groups_merge_and_update(subject: Subject) -> Values:
    p = subject.problem()
    labels = three_groups(p.x)
    first, second = subject.make(p.model), subject.make(p.model)
    first.calibrate(p.x[:30], p.y[:30], groups=labels[:30])
    first.calibrate(p.x[30:50], p.y[30:50], groups=labels[30:50], update=True)
    second.calibrate(p.x[50:], p.y[50:], groups=labels[50:])
    return intervals_of(first.merge(second), p.new, groups=three_groups(p.new))


def groups_through_file(subject: Subject) -> Values:
    p = subject.problem()
    predictor = subject.make(p.model).calibrate(p.x, p.y, groups=three_groups(p.x))
    fresh = through_file(predictor, subject.make(p.model))
    return intervals_of(fresh, p.new, groups=three_groups(p.new))


def groups_too_few_points(subject: Subject) -> Values:
    p = subject.problem()
    labels = ["few" if row % 15 == 0 else "many" for row in range(len(p.y))]
    predictor = subject.make(p.model).calibrate(p.x, p.y, groups=labels)
    with warned() as names:
        found = intervals_of(
            predictor, p.new, (0.1,), groups=["few", "many", "few", "many", "many"]
        )
    return {**found, "warnings": names}


def groups_joint(subject: Subject) -> Values:
    p = subject.problem(4)
    predictor = subject.make(p.model, joint=True).calibrate(p.x, p.y, groups=three_groups(p.x))
    return intervals_of(predictor, p.new[:3], groups=three_groups(p.new[:3]))


# -- inputs of several tensors -----------------------------------------------------------------


def structured(subject: Subject, kind: str, **options: Any) -> Values:
    """Calibrate a model whose input is a dict or a tuple."""
    outputs = 2 if subject.quantiles else 1
    takes = material.TakesDict if kind == "one_dict" else material.TwoInputs
    model = material.fill(takes(outputs), seed=9)
    p = subject.problem()

    def shaped(x: Tensor) -> Any:
        parts = {"left": x[:, :2], "right": x[:, 2:]}
        return tuple(parts.values()) if kind == "tuple" else parts

    predictor = subject.make(model, **options).calibrate(shaped(p.x), p.y)
    loaded = subject.make(model, **options).calibrate(
        [(shaped(x), y) for x, y in material.pieces(p.x, p.y, 11)]
    )
    same = close(ends(predictor, shaped(p.new)), ends(loaded, shaped(p.new)))
    return {**intervals_of(predictor, shaped(p.new)), "same in batches": same}


# -- registering -------------------------------------------------------------------------------


def register_common(subject: Subject, *, joints: Sequence[Any] = (), few: bool = True) -> None:
    """Register what every band method can do."""
    subject.case("arrays", arrays)
    subject.case("numpy_in_batches_of_13", numpy_arrays)
    subject.case("loader_cuts", loader_cuts)
    subject.case("update", update)
    subject.case("merge_two_workers", merge)
    subject.case("save_and_load", handed_on, through_file)
    subject.case("state_dict", handed_on, through_state)
    if few:
        subject.case("too_few_points_warning", too_few_points)
    for value in joints:
        subject.case(f"joint_{str(value).lower()}", joint, value)


def register_groups(subject: Subject) -> None:
    """Register Mondrian calibration."""
    subject.case("groups_labels", groups_labels)
    subject.case("groups_numbers", groups_numbers)
    subject.case("groups_function_of_loader", groups_function)
    subject.case("groups_update_and_merge", groups_merge_and_update)
    subject.case("groups_save_and_load", groups_through_file)
    subject.case("groups_too_few_points_warning", groups_too_few_points)


def register_structured(subject: Subject, **options: Any) -> None:
    """Register inputs of several tensors."""
    for kind in ("dict", "tuple", "one_dict"):
        subject.case(f"input_{kind}", partial(structured, kind=kind, **options))
