"""segmentation.PixelSets, and what else segmentation has."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ffcp
from ffcp.segmentation import DoubleLog, PixelSets
from tests.recorded import material
from tests.recorded.recording import Values, case, warned
from tests.recorded.shared import through_file, through_state

FAMILY = "pixels"
ASKED = ((0.1, None), (0.3, None), (0.1, 0.9), (0.3, 0.5), (0.3, 1))


def sets(predictor: Any, x: Any, asked: Any = ASKED, images: int = 40) -> Values:
    """Return the masks at several levels and shares; so many images were given to calibrate."""
    found: Values = {"method": type(predictor).__name__}
    for alpha, share in asked:
        held = predictor.predict_set(x, alpha, share=share)
        found[f"mask at {alpha}, share {share}"] = held.mask
    found["prediction"] = held.prediction
    skipped = images - len(predictor.calibration)
    return {**found, "classes": held.mask.shape[1], "skipped": skipped}


def _ignored(y: Tensor) -> Tensor:
    """Take the labels of some pixels away."""
    return y.masked_fill(material.uniform(*y.shape, seed=35) < 0.25, 255)


def _with(options: dict[str, Any], double_log: bool = False) -> Values:
    p = material.segmentation()
    model = nn.Sequential(*p.model, DoubleLog(0.005)) if double_log else p.model
    predictor = PixelSets(model, **options).calibrate(p.x, p.y)
    return {**sets(predictor, p.new), "score": predictor.score(p.new[:1], p.new_y[:1])}


for _what, _options in {
    "output": {},
    "feature_0": {"feature": "0"},
    "feature_1": {"feature": "1"},
    "feature_input": {"feature": "input"},
    "norm_1": {"feature": "0", "norm": 1},
    "norm_inf": {"feature": "0", "norm": math.inf},
    "floor": {"feature": "0", "floor": 0.5},
    "smallest": {"smallest": 0.1},
    "method_exact": {"feature": "0", "method": "exact"},
    "method_coloured": {"feature": "0", "method": "coloured"},
    "method_sketch": {"feature": "0", "method": ffcp.scales.Sketch(8)},
    "batches_of_7": {"feature": "0", "batch_size": 7},
}.items():
    case(FAMILY, f"pixelsets_logits_{_what}")(partial(_with, _options))
for _what, _options in {
    "output": {},
    "feature_0": {"feature": "0"},
    "feature_input_norm_1": {"feature": "input", "norm": 1},
}.items():
    case(FAMILY, f"pixelsets_double_log_{_what}")(
        partial(_with, {**_options, "outputs": "double_log"}, double_log=True)
    )


@case(FAMILY, "pixelsets_feature_module")
def _() -> Values:
    p = material.segmentation()
    predictor = PixelSets(p.model, p.model[0]).calibrate(p.x, p.y)
    return {**sets(predictor, p.new), "feature": predictor.feature}


@case(FAMILY, "pixelsets_ignore")
def _() -> Values:
    p = material.segmentation()
    predictor = PixelSets(p.model, "0", ignore=255).calibrate(p.x, _ignored(p.y))
    found = sets(predictor, p.new)
    labels = _ignored(p.new_y)
    held = predictor.predict_set(p.new, 0.3)
    return {
        **found,
        "score": predictor.score(p.new[:2], labels[:2]),
        "coverage": held.coverage(labels, ignore=255),
        "size": held.size,
        "certain": held.certain,
        "mean size": held.mean_size,
    }


@case(FAMILY, "pixelsets_ignore_images_without_labels_warning")
def _() -> Values:
    p = material.segmentation()
    y = _ignored(p.y)
    y[[3, 17]] = 255
    predictor = PixelSets(p.model, ignore=255)
    with warned() as names:
        predictor.calibrate(p.x, y)
    return {**sets(predictor, p.new), "warnings": names}


@case(FAMILY, "pixelsets_loader_cuts")
def _() -> Values:
    p = material.segmentation()
    expected = PixelSets(p.model, "0").calibrate(p.x, p.y).predict_set(p.new, 0.2).mask
    found: Values = {"mask": expected}
    for cut in (1, 7, 32):
        predictor = PixelSets(p.model, "0").calibrate(material.pieces(p.x, p.y, cut))
        mask = predictor.predict_set(p.new.numpy(), 0.2).mask
        found[f"same in batches of {cut}"] = torch.equal(mask, expected)
    return found


@case(FAMILY, "pixelsets_images_of_different_sizes")
def _() -> Values:
    p = material.segmentation()
    x = [p.x[:12], p.x[12:24, :, :4], p.x[24:, :, :, :3]]
    y = [p.y[:12], p.y[12:24, :4], p.y[24:, :, :3]]
    predictor = PixelSets(p.model, "0").calibrate(list(zip(x, y, strict=True)))
    return sets(predictor, p.new)


@case(FAMILY, "pixelsets_update")
def _() -> Values:
    p = material.segmentation()
    predictor = PixelSets(p.model, "0").calibrate(p.x[:15], p.y[:15])
    return sets(predictor.calibrate(p.x[15:], p.y[15:], update=True), p.new)


@case(FAMILY, "pixelsets_merge_two_workers")
def _() -> Values:
    p = material.segmentation()
    first = PixelSets(p.model, "0").calibrate(p.x[:15], p.y[:15])
    second = PixelSets(p.model, "0").calibrate(p.x[15:], p.y[15:])
    return sets(first.merge(second), p.new)


@case(FAMILY, "pixelsets_save_and_load")
def _() -> Values:
    p = material.segmentation()
    predictor = PixelSets(p.model, "0").calibrate(p.x, p.y)
    return sets(through_file(predictor, PixelSets(p.model, "0")), p.new)


@case(FAMILY, "pixelsets_state_dict")
def _() -> Values:
    p = material.segmentation()
    predictor = PixelSets(p.model, "0", outputs="logits").calibrate(p.x, p.y)
    return sets(through_state(predictor, PixelSets(p.model, "0")), p.new)


@case(FAMILY, "pixelsets_too_few_images_warning")
def _() -> Values:
    p = material.segmentation()
    predictor = PixelSets(p.model).calibrate(p.x[:8], p.y[:8])
    with warned() as names:
        found = sets(predictor, p.new, ((0.1, None), (0.1, 0.9), (0.2, None)), images=8)
    return {**found, "warnings": names}


# -- targets and bands for label maps ----------------------------------------------------------


def _rounded(values: Tensor) -> Tensor:
    """Whole numbers, as float32 may differ in its last digits; -999,999 for NaN."""
    return (values.double() * 1000).round().nan_to_num(-999_999).long()


def _labels() -> Tensor:
    return material.segmentation().y[:2]


for _what, _options in {
    "blurred": {},
    "sharp": {"blur": 0},
    "ignore": {"ignore": 2},
    "options": {"blur": 0.5, "smallest": 0.05},
}.items():
    case(FAMILY, f"segmentation_targets_{_what}")(
        lambda options=_options: {
            "thousandths": _rounded(ffcp.segmentation.targets(_labels(), 4, **options)),
            "type": str(ffcp.segmentation.targets(_labels(), 4, **options).dtype),
        }
    )


@case(FAMILY, "segmentation_double_log")
def _() -> Values:
    logits = 3 * material.normal(2, 4, 2, 2, seed=36)
    low, high = DoubleLog().bounds(logits - 0.5, logits + 0.5)
    return {
        "of numbers": ffcp.segmentation.double_log(0.1 + 0.8 * material.uniform(6, seed=37)),
        "module": DoubleLog()(logits),
        "squeezed": DoubleLog(0.01)(logits),
        "lower": low,
        "upper": high,
    }


@case(FAMILY, "segmentation_pixel_coverage")
def _() -> Values:
    mask = material.uniform(3, 4, 5, 5, seed=38) < 0.6
    labels = material.integers(3, 5, 5, below=4, seed=39)
    labels[1] = 255
    return {"coverage": ffcp.segmentation.pixel_coverage(mask, labels, ignore=255)}


def _banded(make: Any) -> Values:
    """Regress on label maps, as the paper does."""
    q = material.segmentation(rows=30)
    model = nn.Sequential(*q.model, DoubleLog(0.01))
    y = ffcp.segmentation.targets(q.y, 4, blur=0).double()
    band = make(model).calibrate(q.x, y).predict_interval(q.new[:1])
    return {"every other column": torch.stack([band.lower, band.upper])[..., ::2]}


for _what, _make in {
    "cp_joint_0.75": lambda model: ffcp.CP(model, joint=0.75),
    "ffcp_joint_0.75": lambda model: ffcp.FFCP(model, "0", joint=0.75),
    "fcp_joint_true": lambda model: ffcp.FCP(model, "0", joint=True, steps=2, lr=0.01),
}.items():
    case(FAMILY, f"{_what}_of_label_maps")(partial(_banded, _make))
