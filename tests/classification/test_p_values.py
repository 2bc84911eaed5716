"""Conformal p-values of labels: against crepes, against sets, and their law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.conformal.random_numbers import Draws
from tests.law import ERROR_RATE

K = 4


def draw(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw logits with ties, and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(rows, K, generator=generator)).round().double()
    return x, torch.multinomial(x.softmax(dim=1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("kind", ["all", "groups", "classes"])
def test_p_values_are_those_of_crepes(
    kind: str, smoothed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    crepes = pytest.importorskip("crepes")
    (x, y), (new, _) = draw(150), draw(40, seed=1)
    groups = [list((rows[:, 0] > 0).long().tolist()) for rows in (x, new)]
    given: dict[str, Any] = {"groups": groups[0]} if kind == "groups" else {}
    asked = {"groups": groups[1]} if kind == "groups" else {}
    predictor = ffcp.LAC(nn.Identity(), class_conditional=kind == "classes", seed=0)
    predictor.calibrate(x, y, **given)
    ours = predictor.p_values(new, smoothed=smoothed, first_row=0, **asked)
    scores, alphas = predictor.score(x, y).numpy(), predictor.score_all(new).numpy()
    share = Draws(0, 4).span(range(40)).numpy()  # crepes draws its own: let it have ours
    monkeypatch.setattr(np.random, "rand", lambda *shape: share)

    def theirs(cal: np.ndarray, new: np.ndarray) -> np.ndarray:
        peer = crepes.ConformalClassifier().fit(cal)
        return np.asarray(peer.predict_p(new, smoothing=smoothed))

    share = np.repeat(share, K, axis=1)
    expected = np.empty_like(alphas)
    if kind == "all":
        expected = theirs(scores, alphas)
    elif kind == "groups":
        old, asked_of, whole = np.array(groups[0]), np.array(groups[1]), share
        for group in (0, 1):
            share = whole[asked_of == group]
            expected[asked_of == group] = theirs(scores[old == group], alphas[asked_of == group])
    else:
        for label in range(K):
            expected[:, label] = theirs(scores[y.numpy() == label], alphas)[:, label]
    np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_p_values_of_a_class_count_the_rows_of_that_class() -> None:
    (x, y), (new, _) = draw(150), draw(40, seed=1)
    predictor = ffcp.LAC(nn.Identity(), class_conditional=True).calibrate(x, y)
    scores, of_new = predictor.score(x, y).reshape(-1), predictor.score_all(new)
    for label in range(K):
        own = scores[y == label]
        at_least = (own[None] >= of_new[:, label, None]).sum(dim=1)
        expected = (at_least + 1) / (len(own) + 1)
        assert torch.allclose(predictor.p_values(new)[:, label], expected.double())


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("make", [ffcp.LAC, ffcp.APS, ffcp.RAPS])
@pytest.mark.parametrize("other_labels", [False, True])
def test_sets_hold_the_labels_whose_p_value_exceeds_alpha(make: Any, other_labels: bool) -> None:
    x, y = draw(300)
    y = y.masked_fill(torch.arange(300) % 40 == 0, K) if other_labels else y
    predictor = make(nn.Identity(), allow_zero_sets=True, other_labels=other_labels, seed=0)
    predictor.calibrate(x[:200], y[:200])
    p_values = predictor.p_values(x[200:], first_row=0)
    for alpha in (0.01, 0.05, 0.1, 0.3):
        mask = predictor.predict_set(x[200:], alpha, first_row=0).mask
        assert torch.equal(p_values > alpha, mask)


@pytest.mark.heavy
@pytest.mark.parametrize("smoothed", [False, True])
def test_p_values_of_true_labels_obey_their_law(smoothed: bool) -> None:
    """Smoothed ones are uniform, others at least as large; one new row for each draw."""
    predictor, found = ffcp.LAC(nn.Identity()), []
    for seed in range(1500):
        x, y = draw(20, seed=seed + 10)
        predictor.calibrate(x[:19], y[:19])
        found.append(float(predictor.p_values(x[19:], smoothed=smoothed)[0, y[19]]))
    if smoothed:
        assert stats.kstest(found, "uniform").pvalue > ERROR_RATE
    for u in (0.05, 0.1, 0.25, 0.5):
        hits = int((np.array(found) <= u).sum())
        assert stats.binom.sf(hits - 1, len(found), u) > ERROR_RATE


def test_one_row_has_the_p_values_that_many_have() -> None:
    x, y = draw(100)
    predictor = ffcp.APS(nn.Identity(), seed=0).calibrate(x[:80], y[:80])
    many = predictor.p_values(x[80:], smoothed=True, first_row=0)
    one = [predictor.p_values(x[[80 + row]], smoothed=True, first_row=row) for row in range(20)]
    assert torch.equal(torch.cat(one), many)


def test_calibrations_without_ranks_are_refused() -> None:
    x, y = draw(100)
    shift = ffcp.calibrations.LabelShift([1.0, 1.0, 1.0, 2.0])
    for predictor in (
        ffcp.LAC(nn.Identity(), calibration=shift).calibrate(x, y),
        ffcp.LAC(nn.Identity()).calibrate(x, y).compress(0.1),
    ):
        with pytest.raises(ValueError, match="p-values"):
            predictor.p_values(x)
