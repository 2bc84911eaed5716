"""An exported label set is the library's, where there is no torch."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from scipy import stats
from torch import nn

import ffcp
from ffcp.classification.rules import LabelRows, label_mask
from ffcp.network import forward
from tests.export.running import run_alone, run_here


def material(rows: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)).eval()
    x = torch.randn(rows, 4)
    y = torch.distributions.Categorical(logits=4 * model(x).detach()).sample()
    return model, x, y


def known_mask(predictor: ffcp.SetPredictor, x, share, alpha, groups=None) -> torch.Tensor:
    """Give the library's sets for random numbers that are known."""
    seen = forward.run_batch(predictor.model, x, predictor.calibrated().requires, 0, groups)
    thresholds = predictor.calibration.quantile(alpha, predictor.calibration.metadata(seen))
    thresholds = predictor._for_all_classes(thresholds).expand(len(x), -1)
    score = predictor.calibrated().score
    norms = None if score.feature is None else seen.norms[score.feature]
    rows = LabelRows(seen.output, torch.as_tensor(share, dtype=torch.float64).expand(len(x)), norms)
    return label_mask(score.rule, rows, thresholds, allow_empty=predictor.allow_zero_sets)


def holds(mask: torch.Tensor, known: torch.Tensor) -> None:
    """Hold a file's sets to the library's: no label less, and hardly one more."""
    assert bool((mask | ~known).all())
    assert float((mask & ~known).double().mean()) < 1e-3


@pytest.mark.heavy
def test_exported_raps_gives_the_librarys_sets_and_covers(tmp_path):
    model, x, y = material(21_300)
    predictor = ffcp.RAPS(model, seed=0).calibrate(x[:300], y[:300])
    predictor.export(tmp_path / "sets.onnx", x[:100], alphas=(0.1,))
    share = np.random.default_rng(0).random(21_000)
    all_rows, one = run_alone(
        tmp_path / "sets.onnx",
        {"x": x[300:], "random": share},
        {"x": x[300:301], "random": share[:1]},
    )
    holds(all_rows["mask"], known_mask(predictor, x[300:], share, 0.1))
    assert torch.equal(one["mask"], all_rows["mask"][:1])
    covered = int(all_rows["mask"].gather(1, y[300:, None]).sum())
    law = stats.betabinom(21_000, 271, 30)
    assert law.ppf(5e-7) <= covered
    silent = onnxruntime.InferenceSession(tmp_path / "sets.onnx").run(
        ["mask"], {"x": np.full((1, 4), np.nan, np.float32), "random": share[:1]}
    )
    assert bool(silent[0].all())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        ffcp.LAC,
        lambda model: ffcp.LAC(model, class_conditional=True, temperature=0.5),
        ffcp.APS,
        lambda model: ffcp.APS(model, allow_zero_sets=True),
        lambda model: ffcp.RAPS(model, class_conditional=True),
        lambda model: ffcp.FFRAPS(model, delta=0.05),
        lambda model: ffcp.FFRAPS(model, delta=0.05, gradient="feature", feature="0"),
    ],
)
@pytest.mark.parametrize("by_groups", [False, True])
def test_every_label_score_gives_the_librarys_sets(make, by_groups, tmp_path):
    model, x, y = material(1_900)
    groups = [row % 2 for row in range(1_900)]
    more = {"groups": groups[:900]} if by_groups else {}
    predictor = make(model).calibrate(x[:900], y[:900], **more)
    randomized = predictor.randomized
    share = np.random.default_rng(0).random(1_000) if randomized else 1.0
    given = {"x": x[900:]}
    given |= {"random": share} if randomized else {}
    given |= {"group": groups[900:]} if by_groups else {}
    rows = groups[900:] if by_groups else None
    levels = (0.15, 0.4)
    predictor.export(tmp_path / "sets.onnx", x[:100], alphas=levels)
    (made,) = run_alone(tmp_path / "sets.onnx", given)
    for level in levels:
        known = known_mask(predictor, x[900:], share, level, rows)
        holds(made[f"mask_{level}"], known)
    if randomized:
        del given["random"]
        for number in (0, 0.4):
            predictor.export(tmp_path / "fixed.onnx", x[:100], alphas=(0.15,), random=number)
            (made,) = run_alone(tmp_path / "fixed.onnx", given)
            holds(made["mask"], known_mask(predictor, x[900:], number, 0.15, rows))


@pytest.mark.heavy
@pytest.mark.parametrize("by_groups", [False, True])
def test_another_label_is_the_last_column_of_a_file(by_groups, tmp_path):
    model, x, y = material(400)
    groups = [row % 2 for row in range(400)]
    y[1::2][:80] = 6  # in the second group there are more of them than alpha allows for
    known = {"groups": groups[:300]} if by_groups else {}
    predictor = ffcp.LAC(model, other_labels=True, names=list("abcdef")).calibrate(
        x[:300], y[:300], **known
    )
    with pytest.warns(ffcp.FFCPWarning, match="alpha"):
        predictor.export(tmp_path / "sets.onnx", x[:100], alphas=(0.1, 0.5))
    feed = {"x": x[300:], **({"group": np.array(groups[300:])} if by_groups else {})}
    made = run_here(tmp_path / "sets.onnx", feed)
    with pytest.warns(ffcp.FFCPWarning, match="infinite"):
        own = predictor.predict_set(x[300:], 0.1, groups=groups[300:] if by_groups else None)
    assert torch.equal(made["mask_0.1"], own.mask)
    assert made["mask_0.1"][1::2].all()
    assert bool(made["mask_0.1"][::2, 6].any()) != by_groups
    assert bool(made["mask_0.5"][:, 6].any()) == by_groups


@pytest.mark.long
@pytest.mark.parametrize("method", [ffcp.APS, ffcp.RAPS, ffcp.FFRAPS])
def test_sets_without_randomness_are_the_librarys_in_a_file_as_well(method, tmp_path):
    model, x, y = material(1_300)
    predictor = method(model, randomized=False, seed=0).calibrate(x[:300], y[:300])
    predictor.export(tmp_path / "sets.onnx", x[:100], alphas=(0.1,))
    made = run_here(tmp_path / "sets.onnx", {"x": x[300:]})
    holds(made["mask"], predictor.predict_set(x[300:], 0.1).mask)
