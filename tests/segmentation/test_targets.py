"""Label maps as targets, scores of logits, and bands around every pixel and class."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.segmentation import DoubleLog, double_log, targets
from tests.conftest import normal

LABELS = torch.randint(0, 4, (3, 9, 11), generator=torch.Generator().manual_seed(0))


def probabilities(numbers: Tensor) -> Tensor:
    return torch.exp(-torch.exp(numbers))


def test_targets_without_blur_are_two_values() -> None:
    numbers = targets(LABELS, 4, blur=0, smallest=0.02)
    hot = nn.functional.one_hot(LABELS, 4).permute(0, 3, 1, 2).bool()
    assert numbers[hot].unique().item() == pytest.approx(math.log(-math.log(0.98)), rel=1e-5)
    assert numbers[~hot].unique().item() == pytest.approx(math.log(-math.log(0.02)), rel=1e-5)


@pytest.mark.parametrize("blur", [0.5, 1.0, 2.5])
def test_blurred_targets_are_shares_of_the_neighbourhood(blur: float) -> None:
    shares = probabilities(targets(LABELS, 4, blur=blur, smallest=1e-6))
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(3, 9, 11), rtol=1e-4, atol=1e-4)
    # Computed by hand at one pixel, near the border, where the rest of the window is missing.
    y, x = torch.meshgrid(torch.arange(9.0), torch.arange(11.0), indexing="ij")
    reach = math.ceil(3 * blur)
    weight = torch.exp(-((y - 1) ** 2 + (x - 2) ** 2) / (2 * blur**2))
    weight *= ((y - 1).abs() <= reach) & ((x - 2).abs() <= reach)
    expected = [float(weight[LABELS[1] == c].sum() / weight.sum()) for c in range(4)]
    torch.testing.assert_close(shares[1, :, 1, 2], torch.tensor(expected), rtol=1e-3, atol=1e-4)


def test_ignored_pixels_have_no_target_and_do_not_blur_into_others() -> None:
    labels = torch.zeros(1, 5, 6, dtype=torch.long)
    labels[0, 2, 2:4] = 9
    numbers = targets(labels, 2, ignore=9)
    assert numbers.isnan().equal((labels == 9)[:, None].expand_as(numbers))
    known = numbers[:, :, labels[0] != 9]
    assert known[:, 0].unique().numel() == 1  # class 0 everywhere, as if nothing were missing


@pytest.mark.parametrize(("labels", "settings", "error", "message"), [
    (torch.zeros(2, 3, 4), {}, TypeError, "float32"),
    (torch.zeros(2, 3, dtype=torch.long), {}, ValueError, "shape"),
    (torch.full((1, 2, 2), 7), {}, ValueError, "7"),
    (torch.full((1, 2, 2), -1), {"ignore": 255}, ValueError, "255"),
    (LABELS, {"smallest": 0.5}, ValueError, "smallest"),
    (LABELS, {"blur": -1.0}, ValueError, "blur"),
])  # fmt: skip
def test_bad_label_maps_are_refused(
    labels: Tensor, settings: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        targets(labels, 4, **settings)


@pytest.mark.parametrize("smallest", [0.0, 0.01])
@pytest.mark.parametrize("scale", [0.1, 3.0, 8.0])
def test_double_log_of_logits_is_that_of_their_softmax(smallest: float, scale: float) -> None:
    logits = scale * normal(2, 5, 3, 4, seed=1)
    p = logits.double().softmax(dim=1)
    expected = double_log(smallest + (1 - 2 * smallest) * p).float()
    torch.testing.assert_close(DoubleLog(smallest)(logits), expected, rtol=1e-3, atol=1e-4)


def test_double_log_is_finite_where_a_softmax_rounds_to_one() -> None:
    logits = torch.tensor([80.0, -80.0, 0.0]).view(1, 3, 1, 1).requires_grad_()
    numbers = DoubleLog()(logits)
    (gradient,) = torch.autograd.grad(numbers.sum(), logits)
    assert numbers.isfinite().all()
    assert gradient.isfinite().all()
    assert numbers[0, 0, 0, 0].item() == pytest.approx(-80, rel=1e-3)
    assert gradient.abs().max() > 0.5


@pytest.mark.parametrize("smallest", [0.0, 0.01])
def test_double_log_bounds_hold_and_are_reached(smallest: float) -> None:
    layer, centre, radius = DoubleLog(smallest), normal(1, 4, 2, 2, seed=3), 0.7
    lower, upper = layer.bounds(centre - radius, centre + radius)
    generator = torch.Generator().manual_seed(0)
    moved = centre + radius * (2 * torch.rand(500, 4, 2, 2, generator=generator) - 1)
    values = layer(moved)
    assert (values >= lower - 1e-5).all()
    assert (values <= upper + 1e-5).all()
    own = torch.eye(4, dtype=torch.bool).view(4, 4, 1, 1)  # row c: class c up, the others down
    best = layer(torch.where(own, centre + radius, centre - radius))
    torch.testing.assert_close(best[torch.arange(4), torch.arange(4)], lower[0])


def test_double_log_has_no_bound_over_everything() -> None:
    everything = torch.full((1, 3, 1, 1), math.inf)
    lower, upper = DoubleLog().bounds(-everything, everything)
    assert not lower.isnan().any()
    assert (upper == math.inf).all()


# -- bands around every pixel and class ----------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.LeakyReLU(),
        nn.Conv2d(6, 3, 3, padding=1),
        DoubleLog(0.01),
    )


def scenes(count: int, size: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    x = normal(count, 1, *size, seed=seed)
    labels = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    labels[:, 0, :2] = 255
    return x, targets(labels, 3, ignore=255)


METHODS = {
    "CP": lambda joint: ffcp.CP(network(), joint=joint, missing=True),
    "FFCP": lambda joint: ffcp.FFCP(network(), "0", joint=joint, missing=True),
    "FFCP, sketched": lambda joint: ffcp.FFCP(
        network(), "0", method=ffcp.scales.Sketch(4), joint=joint, missing=True
    ),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_every_pixel_and_class_has_a_band(name: str) -> None:
    x, y = scenes(40, (6, 8), 1)
    predictor = METHODS[name](False).calibrate(x, y)
    fresh, truth = scenes(60, (6, 8), 2)
    band = predictor.predict_interval(fresh, alpha=0.1)
    assert band.lower.shape == (60, 3, 6, 8)
    known = ~truth.isnan()
    inside = ((band.lower <= truth) & (truth <= band.upper))[known]
    assert 0.86 < inside.double().mean() < 0.96
    # No image had a label in this corner, so nothing can be said of it.
    assert band.upper[:, :, 0, :2].isinf().all()


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_images_of_different_sizes_share_one_threshold(name: str) -> None:
    sizes = [(6, 8), (5, 5), (9, 4)]
    predictor = METHODS[name]((0.9, "known"))
    predictor.calibrate(scenes(1, sizes[i % 3], i) for i in range(30))
    enough = []
    for size in sizes:
        fresh, truth = scenes(40, size, 77)
        band = predictor.predict_interval(fresh, alpha=0.2)
        known = ~truth.isnan()
        inside = (band.lower <= truth) & (truth <= band.upper) & known
        shares = inside.sum(dim=(1, 2, 3)) / known.sum(dim=(1, 2, 3))
        enough.append(shares >= 0.9)
    assert 0.65 < torch.cat(enough).double().mean() < 0.95


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_one_threshold_for_each_pixel_needs_one_size() -> None:
    predictor = METHODS["CP"](False).calibrate(*scenes(20, (6, 8), 1))
    with pytest.raises(ValueError, match="144"):
        predictor.predict_interval(torch.zeros(1, 1, 5, 5))


def test_fcp_takes_one_ball_for_a_whole_image() -> None:
    x, y = scenes(30, (6, 8), 1)
    predictor = ffcp.FCP(network(), "0", joint="known", missing=True, steps=3).calibrate(x, y)
    assert predictor.calibration.scores.shape == (30, 1)
    band = predictor.predict_interval(x, alpha=0.2)
    assert (band.lower <= band.prediction).all()
    assert (band.prediction <= band.upper).all()
    assert float(predictor.feature_coverage(x, y, alpha=0.2)) >= 0.8
