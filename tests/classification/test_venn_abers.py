"""Venn-Abers: exact against isotonic regression and its package, the law of validity, files."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.conformal.venn_abers import Steps
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE


def rounded(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw scores with ties, and labels that follow them."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=rows).round(1)
    return scores, (random.random(rows) < 1 / (1 + np.exp(-2 * scores))).astype(int)


@pytest.mark.parametrize("seed", range(25))
def test_pairs_are_those_of_isotonic_regression_with_the_row_added(seed: int) -> None:
    isotonic = pytest.importorskip("sklearn.isotonic").IsotonicRegression
    scores, labels = rounded(1 + 2 * seed, seed)
    new = np.linspace(-3, 3, 13).round(1)
    for label, ours in enumerate(Steps.of(scores, labels).at(new)):
        for one, p in zip(new, ours, strict=True):
            fitted = isotonic().fit(np.append(scores, one), np.append(labels, label))
            assert p == pytest.approx(fitted.predict([one])[0], abs=1e-12)


@pytest.mark.parametrize("rows", [3, 40, 700])
def test_pairs_and_probabilities_are_those_of_the_package(rows: int) -> None:
    package = pytest.importorskip("venn_abers")
    scores, labels = rounded(rows, rows)
    both, new = np.stack([-scores, scores], axis=1), np.linspace(-3, 3, 50)
    peer = package.VennAbers()
    peer.fit(both, labels)
    merged, pairs = peer.predict_proba(np.stack([-new, new], axis=1))
    venn = ffcp.VennAbers(nn.Identity()).calibrate(torch.tensor(scores), torch.tensor(labels))
    found = venn.predict_pair(torch.tensor(new))
    np.testing.assert_allclose(torch.stack(found, dim=1), pairs, atol=1e-12)
    np.testing.assert_allclose(venn.predict_proba(torch.tensor(new)), merged, atol=1e-12)


def test_one_logit_and_two_say_the_same_and_one_row_as_many() -> None:
    z, y = normal(200, seed=1).double(), torch.arange(200) % 2
    two = torch.stack([torch.zeros(200).double(), z], dim=1)
    wanted = ffcp.VennAbers(nn.Identity()).calibrate(z[:150], y[:150]).predict_proba(z[150:])
    for x in (z[:, None], two, two + 3):
        venn = ffcp.VennAbers(nn.Identity()).calibrate(x[:150], y[:150])
        assert venn.predict_proba(x[150:]).allclose(wanted, atol=1e-12)
        one = torch.cat([venn.predict_proba(row[None]) for row in x[150:160]])
        assert torch.equal(one, venn.predict_proba(x[150:160]))
    assert torch.equal(venn(x[150:]), venn.predict_proba(x[150:]))


def test_several_classes_are_each_against_the_rest_and_sum_to_one() -> None:
    x = 2 * normal(600, 4, seed=2).double()
    y = torch.distributions.Categorical(logits=x).sample()
    venn = ffcp.VennAbers(nn.Identity()).calibrate(x[:500], y[:500])
    p0, p1 = venn.predict_pair(x[500:])
    probabilities = venn.predict_proba(x[500:])
    assert p0.shape == p1.shape == probabilities.shape == (100, 4)
    assert bool(((p0 >= 0) & (p0 < p1) & (p1 <= 1)).all())
    assert probabilities.sum(dim=1).allclose(torch.ones(100).double())
    for label in range(4):
        others = x[:, [one for one in range(4) if one != label]].logsumexp(dim=1)
        alone = ffcp.VennAbers(nn.Identity())
        alone.calibrate((x[:, label] - others)[:500], (y == label)[:500].long())
        pair = alone.predict_pair((x[:, label] - others)[500:])
        assert pair.p0.allclose(p0[:, label], atol=1e-12)
        assert pair.p1.allclose(p1[:, label], atol=1e-12)


def test_sure_logits_are_told_apart() -> None:
    """Where 1 - p is 0 in floating point, rows still have an order."""
    x = torch.tensor([[60.0, 0.0, 0.0], [80.0, 0.0, 0.0], [70.0, 0.0, 0.0]]).double()
    venn = ffcp.VennAbers(nn.Identity()).calibrate(x, torch.tensor([1, 0, 0]))
    scores = venn.calibration.scores[:, 0]
    assert scores.tolist() == pytest.approx([one - math.log(2) for one in (60, 80, 70)])


@pytest.mark.heavy
@pytest.mark.parametrize("classes", [2, 3])
def test_the_right_one_of_the_pair_is_calibrated(classes: int) -> None:
    """Given p, the label is 1 with probability p: in every bin of p, over many draws.

    The network is too sure and ties are many. A right program fails for the share ERROR_RATE of
    all seeds.
    """
    generator, repeats, rows, edges = torch.Generator().manual_seed(3), 400, 60, 6
    venn, sums = ffcp.VennAbers(nn.Identity()), torch.zeros(repeats, edges).double()
    wrong = torch.zeros(repeats, edges).double()
    for draw in range(repeats):
        x = (2 * torch.randn(rows + 20, classes, generator=generator)).round() / 2
        y = torch.multinomial((x / 2).softmax(dim=1), 1, generator=generator)[:, 0]
        p0, p1 = venn.calibrate(2 * x[:rows], y[:rows]).predict_pair(2 * x[rows:])
        is_one = (y[rows:] == 1).double()
        p0, p1 = (p0, p1) if classes == 2 else (p0[:, 1], p1[:, 1])
        right, other = p1.where(is_one == 1, p0), p0.where(is_one == 1, p1)
        for table, p in ((sums, right), (wrong, other)):
            bins = (p * edges).long().clamp_max(edges - 1)
            table[draw] += torch.zeros(edges).double().scatter_add(0, bins, is_one - p)
    # Rows of a draw depend on each other, draws do not. Bonferroni over the bins.
    z = sums.mean(dim=0) / (sums.std(dim=0) / repeats**0.5)
    assert 2 * stats.norm.sf(float(z.abs().max())) * edges > ERROR_RATE
    z = wrong.mean(dim=0) / (wrong.std(dim=0) / repeats**0.5)
    assert 2 * stats.norm.sf(float(z.abs().max())) < ERROR_RATE  # which the other one is not


@pytest.mark.long
def test_a_hundred_thousand_rows_take_seconds() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(4))
    y = (torch.rand(100_000, generator=torch.Generator().manual_seed(5)) < x.sigmoid()).long()
    start = time.perf_counter()
    found = ffcp.VennAbers(nn.Identity()).calibrate(x, y).predict_proba(x)
    assert time.perf_counter() - start < 10
    assert float((found[:, 1] - x.sigmoid()).abs().mean()) < 0.02


def test_files_merging_and_threads(tmp_path: Any) -> None:
    model, x, y = small_mlp(outputs=3), normal(300, 4, seed=6), torch.arange(300) % 3
    venn = ffcp.VennAbers(model).calibrate(x, y)
    venn.save(tmp_path / "venn.safetensors")
    loaded = ffcp.load(tmp_path / "venn.safetensors", model)
    wanted = venn.predict_proba(x)
    assert torch.equal(loaded.predict_proba(x), wanted)
    parts = [
        ffcp.VennAbers(model).calibrate(x[rows], y[rows]) for rows in (slice(100), slice(100, 300))
    ]
    assert parts[0].merge(parts[1]).predict_proba(x).allclose(wanted)
    fresh = ffcp.load(tmp_path / "venn.safetensors", model)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: fresh.predict_proba(x), range(8)):
            assert torch.equal(found, wanted)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="weights"):
        venn.predict_proba(x)


def test_what_cannot_be_calibrated_is_refused() -> None:
    venn, x, y = ffcp.VennAbers(nn.Identity()), normal(30, 3, seed=7), torch.arange(30) % 3
    with pytest.raises(RuntimeError, match="calibrate"):
        venn.predict_proba(x)
    for given, labels, error, message in (
        (x, y + 1, ValueError, "out of range"),
        (x, y.double(), TypeError, "integers"),
        (x.softmax(dim=1), y, ValueError, "probabilities"),
        (x[:, :, None], y, ValueError, "shape"),
        (x.masked_fill(x > 1, -math.inf), y, ValueError, "row"),
    ):
        with pytest.raises(error, match=message):
            venn.calibrate(given, labels)
    with pytest.raises(ValueError, match="groups"):
        venn.calibrate(x, y, groups=["a"] * 30)
    venn.calibrate(x, y)
    with pytest.raises(ValueError, match="compressed"):
        venn.compress()
    with pytest.raises(ValueError, match="export"):
        venn.export("venn.onnx", x)
    two: Tensor = x[:, :2]
    with pytest.raises(ValueError, match="3"):
        ffcp.VennAbers(nn.Identity()).calibrate(x, y).predict_proba(two)
