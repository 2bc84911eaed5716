"""gradient_norms, the conformal rank and quantile, the pinball loss, metrics and bounds."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ffcp
from ffcp import metrics
from ffcp.segmentation import DoubleLog
from tests.recorded import material
from tests.recorded.recording import Values, case

FAMILY = "parts"


# -- gradient norms ----------------------------------------------------------------------------


def _norms(model: nn.Module, x: Any, features: list[Any], **options: Any) -> Values:
    prediction, norms = ffcp.gradient_norms(model, x, features, **options)
    named = {f if isinstance(f, str) else "module": values for f, values in norms.items()}
    return {"prediction": prediction, **{f"norms at {k}": v for k, v in named.items()}}


def _vectors(options: dict[str, Any]) -> Values:
    model = material.net(3)
    features = ["input", "0", model[3], "output"]
    return _norms(model, material.normal(4, 3, seed=51), features, **options)


def _maps(options: dict[str, Any]) -> Values:
    found = _norms(material.map_net(), material.normal(1, 2, 6, 6, seed=52), ["0"], **options)
    return {"norms": found["norms at 0"]}


for _norm in (1, 2, math.inf):
    case(FAMILY, f"gradient_norms_norm_{_norm}")(partial(_vectors, {"norm": _norm}))
for _what, _method in {
    "exact": "exact",
    "sketch": ffcp.scales.Sketch(12, seed=2),
    "smooth": ffcp.scales.Smooth(0.3, samples=5),
    "smooth_sketch": ffcp.scales.Smooth(0.3, samples=2, seed=4, method=ffcp.scales.Sketch(4)),
}.items():
    case(FAMILY, f"gradient_norms_method_{_what}")(partial(_vectors, {"method": _method}))
case(FAMILY, "gradient_norms_batches_of_2")(partial(_vectors, {"batch_size": 2}))
for _what, _options in {
    "by_default": {},
    "exact": {"method": "exact"},
    "coloured": {"method": "coloured"},
    "coloured_norm_1": {"method": "coloured", "norm": 1},
    "coloured_norm_inf": {"method": "coloured", "norm": math.inf},
    "sketch": {"method": ffcp.scales.Sketch(8)},
}.items():
    case(FAMILY, f"gradient_norms_maps_{_what}")(partial(_maps, _options))


@case(FAMILY, "gradient_norms_maps_smooth_coloured")
def _() -> Values:
    layers = [nn.Conv2d(1, 1, 3, padding=1), nn.Tanh(), nn.Conv2d(1, 2, 3, padding=1)]
    model = material.fill(nn.Sequential(*layers), seed=5)
    method = ffcp.scales.Smooth(0.3, samples=3, method="coloured")
    return _norms(model, material.normal(2, 1, 3, 3, seed=53), ["0"], method=method)


@case(FAMILY, "gradient_norms_windows_that_stride_pool_and_grow")
def _() -> Values:
    layers = [
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False),
        nn.Conv2d(2, 2, 1),
    ]
    model = material.fill(nn.Sequential(*layers), seed=55)
    found = _norms(model, material.normal(1, 1, 8, 8, seed=54), ["0", "input"], method="coloured")
    return {key: values[:, :, ::2, ::3] for key, values in found.items()}


@case(FAMILY, "gradient_norms_so_many_outputs_that_they_are_sketched")
def _() -> Values:
    model = material.fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4200)), seed=56)
    x = material.normal(2, 3, seed=57)
    _, norms = ffcp.gradient_norms(model, x, ["0"])
    _, exact = ffcp.gradient_norms(model, x, ["0"], method="exact")
    return {"some": norms["0"][:, ::300], "some exact": exact["0"][:, ::300]}


class _Cube(torch.autograd.Function):
    """An operation of one's own, which torch cannot batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.numpy() ** 2 * gradient.numpy())


class _Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(x)


@case(FAMILY, "gradient_norms_operation_that_cannot_be_batched")
def _() -> Values:
    model = material.fill(nn.Sequential(nn.Linear(3, 4), _Cubed(), nn.Linear(4, 3)), seed=85)
    return _norms(model, material.normal(3, 3, seed=86), ["0"])


@case(FAMILY, "gradient_norms_dict_input")
def _() -> Values:
    model = material.fill(material.TwoInputs(2), seed=9)
    x = {"left": material.normal(4, 2, seed=58), "right": material.normal(4, 1, seed=59)}
    return _norms(model, x, ["input", "input[left]", "input[right]", "b"])


# -- ranks, quantiles, loss --------------------------------------------------------------------


@case(FAMILY, "conformal_rank")
def _() -> Values:
    alphas = (0.7, 0.1, 0.05, 0.3, Fraction(1, 3), 0.999)
    return {
        f"n={n}": [ffcp.conformal_rank(n, alpha) for alpha in alphas]
        for n in (0, 1, 8, 9, 10, 19, 99, 100, 999)
    }


@case(FAMILY, "conformal_quantile")
def _() -> Values:
    one, several = material.normal(19, seed=61), material.normal(19, 3, seed=62)
    found: Values = {}
    for alpha in (0.05, 0.1, 0.5, 0.04):
        found[f"one at {alpha}"] = ffcp.conformal_quantile(one, alpha)
        found[f"several at {alpha}"] = ffcp.conformal_quantile(several, alpha)
    found["ties"] = ffcp.conformal_quantile(torch.tensor([1, 2, 2, 2, 3.0]).double(), 0.5)
    return found


@case(FAMILY, "pinball_loss")
def _() -> Values:
    guesses, y = material.normal(7, 2, seed=63), material.normal(7, seed=64)
    several = material.normal(5, 3, 3, seed=65)
    return {
        "default": ffcp.pinball_loss(guesses, y),
        "column": ffcp.pinball_loss(guesses, y[:, None], (0.1, 0.9)),
        "three levels": ffcp.pinball_loss(several, y[:5, None].expand(5, 3), (0.1, 0.5, 0.8)),
    }


# -- metrics -----------------------------------------------------------------------------------


def _share(share: Any) -> list[Any]:
    return [float(share), share.low, share.high, share.rows]


def _grouped(name: str, found: Any) -> Values:
    values: Values = {f"{name}: {label}": _share(s) for label, s in found.groups.items()}
    worst = {f"{name} worst group": str(found.worst_group), f"{name} worst": _share(found.worst)}
    return {**values, **worst, f"{name} gap": found.gap}


def _some_bands(outputs: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    x, y = material.normal(80, 2, seed=71), material.normal(80, outputs, seed=72)
    lower = -1 - material.uniform(80, outputs, seed=73)
    upper = 0.4 + material.uniform(80, outputs, seed=74)
    return (lower, upper), y, x


@case(FAMILY, "metrics_of_bands")
def _() -> Values:
    band, y, x = _some_bands(1)
    labels = ["a" if v > 0.3 else "b" for v in x[:, 0]]
    return {
        "coverage": _share(metrics.coverage(band, y)),
        "mean length": metrics.mean_length(band),
        "interval score": metrics.interval_score(band, y),
        "interval score at 0.3": metrics.interval_score(band, y[:, 0], alpha=0.3),
        **_grouped("tertiles", metrics.group_coverage(band, y)),
        **_grouped("labels", metrics.group_coverage(band, y, labels)),
        **_grouped("feature", metrics.group_coverage(band, y, feature=x[:, 1], slices=4)),
        **_grouped("sizes", metrics.size_stratified_coverage(band, y)),
        **_grouped("three sizes", metrics.size_stratified_coverage(band, y, bins=3)),
        "worst slab": _share(metrics.worst_slab_coverage(band, y, x, directions=60)),
        "worst slab of options": _share(
            metrics.worst_slab_coverage(band, y, x, share=0.3, directions=40, seed=3)
        ),
    }


@case(FAMILY, "metrics_of_bands_of_several_outputs")
def _() -> Values:
    band, y, x = _some_bands(4)
    found: Values = {"mean length": metrics.mean_length(band)}
    found["interval score"] = metrics.interval_score(band, y, 0.2)
    for joint in (False, True, 0.75):
        found[f"coverage, joint {joint}"] = _share(metrics.coverage(band, y, joint=joint))
        found |= _grouped(f"tertiles, joint {joint}", metrics.group_coverage(band, y, joint=joint))
        sizes = metrics.size_stratified_coverage(band, y, bins=3, joint=joint)
        found |= _grouped(f"sizes, joint {joint}", sizes)
        slab = metrics.worst_slab_coverage(band, y, x, directions=40, joint=joint)
        found[f"worst slab, joint {joint}"] = _share(slab)
    return found


@case(FAMILY, "metrics_of_infinite_bands")
def _() -> Values:
    (lower, upper), y, _ = _some_bands(1)
    band = lower, upper.clone()
    band[1][:20] = math.inf
    sizes = metrics.size_stratified_coverage(band, y, bins=3)
    return {"mean length": metrics.mean_length(band), **_grouped("sizes", sizes)}


@case(FAMILY, "metrics_cut_and_tertiles")
def _() -> Values:
    values = material.normal(12, seed=75)
    return {
        "cut": metrics.cut(values).tolist(),
        "cut in 5": metrics.cut(values, 5).tolist(),
        "cut of ties": metrics.cut([1.0, 1.0, 1.0, 2.0], 3).tolist(),
        "tertiles": metrics.tertiles(values).tolist(),
        "tertiles with zeros": metrics.tertiles([0, 0, 0, 0, 1, 2, 0]).tolist(),
    }


@case(FAMILY, "metrics_of_sets")
def _() -> Values:
    mask = material.uniform(60, 12, seed=76) < material.uniform(60, 1, seed=77)
    y = material.integers(60, below=12, seed=78)
    held = ffcp.LabelSet(mask)
    return {
        "coverage": _share(metrics.set_coverage(held, y)),
        "coverage of the set": _share(held.coverage(y)),
        "mean size": metrics.mean_set_size(held),
        "median size": metrics.median_set_size(mask),
        "violation": metrics.size_stratified_violation(held, y),
        "violation at 0.3": metrics.size_stratified_violation(mask, y, 0.3, (0, 2, 5)),
        **_grouped("classes", metrics.class_coverage(held, y)),
        "gap of classes": metrics.class_coverage_gap(held, y, 0.2),
        "singletons": _share(metrics.singleton_hit_ratio(held, y)),
        "labels": [labels.tolist() for labels in held.labels[:5]],
        "sizes": held.sizes,
    }


# -- bounds ------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x - 0.5 * self.inner(x)) + 0.1)


class _Functions(nn.Module):
    """Functions in place of layers, and the rarer paddings and poolings."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv1d(1, 2, 3, padding="same")
        self.valid = nn.Conv1d(2, 2, 2, padding="valid", dilation=2)
        self.pool, self.out = nn.AdaptiveAvgPool1d(2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.same(x), 0.2)
        x = functional.dropout(self.pool(torch.sigmoid(self.valid(x))), training=self.training)
        return -self.out(functional.gelu(torch.flatten(x, 1)) * 2.0)


def _dense(*activations: nn.Module) -> nn.Sequential:
    layers = [layer for a in activations for layer in (nn.Linear(3, 3), a)]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(3, 2))


HEADS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "affine": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (3,)),
    "relu": (lambda: _dense(nn.ReLU(), nn.ReLU()), (3,)),
    "leaky_relu": (lambda: _dense(nn.LeakyReLU(0.1), nn.LeakyReLU(0.3)), (3,)),
    "tanh": (lambda: _dense(nn.Tanh(), nn.Tanh()), (3,)),
    "sigmoid": (lambda: _dense(nn.Sigmoid(), nn.Sigmoid()), (3,)),
    "gelu": (lambda: _dense(nn.GELU(), nn.GELU()), (3,)),
    "silu": (lambda: _dense(nn.SiLU(), nn.SiLU()), (3,)),
    "residual": (_Residual, (3,)),
    "functions": (_Functions, (1, 6)),
    "batch_norm": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)), (3,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, stride=2, padding=1),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(2, 1, 2),
            nn.Flatten(),
            nn.Linear(1, 2),
        ),
        (1, 4, 4),
    ),
}


def _bounded(name: str, how: str, norm: float) -> Values:
    build, shape = HEADS[name]
    head = material.fill(build(), seed=81)
    center = material.normal(4, *shape, seed=82)
    bound = getattr(ffcp.bounds, how)
    radii = torch.tensor([0.0, 0.1, 1.5, math.inf], dtype=torch.float64)
    one = bound(head, center[:2], 0.3, norm)
    each = bound(ffcp.bounds.trace(head), center, radii, norm)
    return {
        "lower": one.lower,
        "upper": one.upper,
        "lower, a radius each": each.lower,
        "upper, a radius each": each.upper,
    }


for _name, _how, _norm in itertools.product(HEADS, ("ibp", "crown"), (2, math.inf)):
    case(FAMILY, f"bounds_{_how}_{_name}_norm_{_norm}")(partial(_bounded, _name, _how, _norm))


@case(FAMILY, "bounds_ibp_of_a_layer_that_bounds_itself")
def _() -> Values:
    head = material.fill(nn.Sequential(nn.Conv2d(2, 3, 1), DoubleLog(0.01)), seed=83)
    found = ffcp.bounds.ibp(head, material.normal(2, 2, 2, 2, seed=84), 0.2)
    return {"lower": found.lower, "upper": found.upper}
