"""Pixel sets by groups of images: both guarantees inside every group, as laws over many splits."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import ffcp
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.rank import conformal_rank
from ffcp.segmentation import PixelSets
from ffcp.segmentation.counts import BINS, PixelCounts, to_bins
from tests.law import ERROR_RATE, upper_p_value
from tests.segmentation.material import IGNORE, X, Y, holed, network, scenes
from tests.segmentation.test_law import covered_share, too_high

pytestmark = pytest.mark.heavy

N, T, ALPHA = 30, 10, 0.1
GROUPS = ["day", "night"] * 30
NEW = ["day"] * T + ["night"] * T


def day(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return scenes(rows, seed=seed, error=0.2)


def night(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return scenes(rows, seed=seed)


# -- the laws ----------------------------------------------------------------------------------


@cache
def pool(kind: str) -> Tensor:
    """Counts of pixels in bins, for many images of one kind: see tests.segmentation.material."""
    x, y = day(1500, seed=1) if kind == "day" else night(1500, seed=2)
    return PixelSets(network()).calibrate(x, y).calibration.scores


def splits(repeats: int):
    """Draw N calibration and T test images of each kind."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(repeats):
        yield [
            counts[torch.randperm(len(counts), generator=generator)[: N + T]]
            for counts in (pool("day"), pool("night"))
        ]


def shares(repeats: int, share: float | None, *, by_groups: bool) -> np.ndarray:
    """Give the covered share of every test image, (repeats, kinds, T)."""
    drawn = []
    for light, dark in splits(repeats):
        groups = ["day"] * N + ["night"] * N if by_groups else ["all"] * (2 * N)
        images = Mondrian(PixelCounts()).fit(torch.cat([light[:N], dark[:N]]), {"group": groups})
        asked = ["day", "night"] if by_groups else ["all", "all"]
        levels = images.quantile(ALPHA, {"group": asked, "share": [share, share]})
        bins = to_bins(levels[:, 0]).tolist()
        tests = zip((light[N:], dark[N:]), bins, strict=True)
        drawn.append([covered_share(counts, last).numpy() for counts, last in tests])
    return np.array(drawn)


def test_the_mean_share_missed_is_at_most_alpha_in_every_group() -> None:
    losses = 1 - shares(200, None, by_groups=True).mean(axis=2)
    for kind in range(2):
        assert too_high(losses[:, kind], ALPHA) > ERROR_RATE
        noise = 4 * losses[:, kind].std() / math.sqrt(len(losses))
        assert losses[:, kind].mean() >= ALPHA - 2 / (N + 1) - noise


@pytest.mark.parametrize("share", [0.5, 0.9, 1])
def test_images_of_every_group_are_covered_to_a_share(share: float) -> None:
    covered = shares(300, share, by_groups=True) >= share - 1e-9
    for kind in range(2):
        hits = covered[:, kind].sum(axis=1)
        assert upper_p_value(hits, T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


def test_without_groups_the_night_is_missed() -> None:
    # So the tests above have something to find.
    losses = 1 - shares(200, None, by_groups=False).mean(axis=2)
    assert too_high(losses[:, 1], ALPHA) < 1e-8
    hits = (shares(200, 0.9, by_groups=False) >= 0.9 - 1e-9)[:, 1].sum(axis=1)
    assert upper_p_value(hits, T, 2 * N, conformal_rank(2 * N, ALPHA)) < 1e-8


@pytest.mark.heavy
def test_the_mean_share_missed_in_groups_from_images_to_sets() -> None:
    model, losses = network(), []
    for seed in range(150):
        (x, y), (x_dark, y_dark) = day(N + T, seed=seed), night(N + T, seed=1000 + seed)
        y, y_dark = holed(y, seed=seed), holed(y_dark, seed=1000 + seed)
        predictor = PixelSets(model, ignore=IGNORE).calibrate(
            torch.cat([x[:N], x_dark[:N]]),
            torch.cat([y[:N], y_dark[:N]]),
            groups=["day"] * N + ["night"] * N,
        )
        sets = predictor.predict_set(torch.cat([x[N:], x_dark[N:]]), ALPHA, groups=NEW)
        covered = sets.coverage(torch.cat([y[N:], y_dark[N:]]), IGNORE)
        losses.append(1 - covered.view(2, T).mean(dim=1).numpy())
    for kind in range(2):
        assert too_high(np.array(losses)[:, kind], ALPHA) > ERROR_RATE


# -- thresholds --------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", ["output", "0"])
@pytest.mark.parametrize("share", [None, 0.8, 1])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_each_group_has_its_own_threshold(
    feature: str, share: float | None, batch_size: int | None
) -> None:
    predictor = PixelSets(network(), feature, batch_size=batch_size)
    predictor.calibrate(X, Y, groups=GROUPS)
    assert predictor.calibration.groups == {"day": 30, "night": 30}
    sets = predictor.predict_set(X, 0.2, share=share, groups=GROUPS)
    for first in range(2):  # the images of one group, every other
        alone = PixelSets(network(), feature).calibrate(X[first::2], Y[first::2])
        assert torch.equal(
            sets.mask[first::2], alone.predict_set(X[first::2], 0.2, share=share).mask
        )


def test_groups_are_merged_updated_saved_and_loaded(tmp_path) -> None:
    def some(rows: slice) -> PixelSets:
        return PixelSets(network()).calibrate(X[rows], Y[rows], groups=GROUPS[rows])

    whole = some(slice(0, 60))
    merged = PixelSets(network()).merge(some(slice(0, 25))).merge(some(slice(25, 60)))
    updated = some(slice(0, 25)).calibrate(X[25:], Y[25:], groups=GROUPS[25:], update=True)
    whole.save(tmp_path / "sets.safetensors")
    loaded = PixelSets(network()).load(tmp_path / "sets.safetensors")
    assert loaded.calibration.scores.dtype == torch.int32
    for share in (None, 0.9):
        expected = whole.predict_set(X, 0.2, share=share, groups=GROUPS).mask
        for other in (merged, updated, loaded):
            assert torch.equal(other.predict_set(X, 0.2, share=share, groups=GROUPS).mask, expected)


def test_images_without_labels_leave_with_their_group() -> None:
    y = Y.clone()
    y[[1, 3]] = IGNORE
    with pytest.warns(ffcp.FFCPWarning, match="2 of 60"):
        predictor = PixelSets(network(), ignore=IGNORE).calibrate(X, y, groups=GROUPS)
    assert predictor.calibration.groups == {"day": 30, "night": 28}
    assert predictor.calibration.scores.shape == (58, BINS)


@pytest.mark.parametrize("share", [None, 0.9])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_small_group_gets_all_labels_and_is_named(
    share: float | None, batch_size: int | None
) -> None:
    groups = ["day"] * 52 + ["night"] * 8
    predictor = PixelSets(network(), batch_size=batch_size).calibrate(X, Y, groups=groups)
    with pytest.warns(ffcp.FFCPWarning, match="8 of 60.*night"):
        sets = predictor.predict_set(X, 0.1, share=share, groups=groups)
    assert sets.mask[52:].all()
    assert not sets.mask[:52].all()


def test_groups_that_do_not_fit() -> None:
    predictor = PixelSets(network()).calibrate(X, Y, groups=GROUPS)
    with pytest.raises(ValueError, match="dawn"):
        predictor.predict_set(X[:1], groups=["dawn"])
    with pytest.raises(ValueError, match="groups"):
        predictor.predict_set(X)
    with pytest.raises(ValueError, match="groups"):
        PixelSets(network()).calibrate(X, Y).predict_set(X, groups=GROUPS)
