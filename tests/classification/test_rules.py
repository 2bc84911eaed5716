"""Scores and sets against loops over labels, to the bit."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ffcp
from ffcp import LabelSet
from ffcp.classification import rules
from ffcp.classification.rules import (
    Cumulative,
    LabelRows,
    Rule,
    Threshold,
    jacobian_norms,
    probabilities,
)
from ffcp.conformal.random_numbers import Draws
from tests.conftest import normal

pytestmark = pytest.mark.heavy

SCORES = {
    "LAC": Threshold(temperature=1.3),
    "APS": Cumulative(),
    "RAPS": Cumulative(lam=0.07, kreg=2),
    "RAPS without free ranks": Cumulative(lam=0.3, kreg=0, temperature=0.7),
    "FFRAPS": Cumulative(lam=0.01, kreg=1, delta=0.05, temperature=1.7),
    "FFRAPS, large delta": Cumulative(delta=30.0),
    "FFRAPS, feature": Cumulative(lam=0.01, kreg=1, delta=0.2, gradient="feature"),
}


def some_rows(logits: Tensor, seed: int = 0) -> LabelRows:
    share = torch.from_numpy(np.random.default_rng(seed).random(len(logits)))
    return LabelRows(logits, share, normal(len(logits), seed=seed).abs())


def by_loop(score: Rule, rows: LabelRows) -> list[list[float]]:
    """All scores of all labels: sort labels in Python, add weights as exact fractions."""
    result = []
    logits = rows.logits.tolist()
    for i, weights in enumerate(score.weights(rows.logits).tolist()):
        order = sorted(range(len(weights)), key=lambda j: (-weights[j], -logits[i][j], j))
        scores = [0.0] * len(weights)
        before = Fraction(0)
        for rank, label in enumerate(order, start=1):
            if isinstance(score, Threshold):
                scores[label] = 1 - weights[label]
                continue
            weight, below = max(weights[label], 0), max(-weights[label], 0)
            value = float(before) + float(rows.share[i]) * weight
            value += score.lam * max(rank - score.kreg, 0) if score.lam else below
            if score.gradient == "feature":
                value += score.delta * float(rows.norms[i])
            scores[label] = value
            before += Fraction(weight)
        result.append(scores)
    return result


# Few distinct values, so ties abound; 60 and 800 saturate the softmax.
LOGITS = st.integers(2, 9).flatmap(
    lambda classes: st.lists(
        st.lists(
            st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.3, 60.0, 800.0, -800.0]),
            min_size=classes,
            max_size=classes,
        ),
        min_size=1,
        max_size=6,
    )
)


@pytest.mark.parametrize("name", SCORES)
@given(values=LOGITS, threshold=st.sampled_from([-0.1, 0.0, 0.5, 1.0, 1.02, 2.0, math.inf, "own"]))
def test_scores_and_sets_agree_with_loops(name: str, values: list, threshold: object) -> None:
    score, rows = SCORES[name], some_rows(torch.tensor(values))
    expected = torch.tensor(by_loop(score, rows), dtype=torch.float64)
    assert torch.equal(rules.all_scores(score, rows), expected)
    for label in range(expected.shape[1]):
        labels = torch.full((len(expected),), label)
        assert torch.equal(rules.label_scores(score, rows, labels), expected[:, label])
    # A threshold that is the score of a label: it must let that label in.
    level = expected[0, -1] if threshold == "own" else torch.tensor(threshold, dtype=torch.float64)
    mask = rules.label_mask(score, rows, level, allow_empty=True)
    assert torch.equal(mask, expected <= level)
    forced = rules.label_mask(score, rows, level, allow_empty=False)
    top = score.weights(rows.logits).argmax(dim=1)
    mask[~mask.any(dim=1), top[~mask.any(dim=1)]] = True
    assert torch.equal(forced, mask)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 100.0])
def test_sets_of_many_labels_are_found_without_a_full_sort(name: str, spread: float) -> None:
    # 700 labels: sets of more than 64 and more than 256 labels, and of all, occur.
    score, rows = SCORES[name], some_rows((normal(40, 700, seed=1) * spread).round(decimals=1))
    scores = rules.all_scores(score, rows)
    for q in (0.01, 0.1, 0.5, 0.9, 1.0):
        level = scores.flatten().quantile(q, interpolation="lower")
        mask = rules.label_mask(score, rows, level, allow_empty=True)
        assert torch.equal(mask, scores <= level)


@pytest.mark.parametrize("name", SCORES)
def test_a_threshold_for_each_label(name: str) -> None:
    score, rows = SCORES[name], some_rows(normal(30, 6, seed=2))
    levels = torch.tensor([0.1, 0.5, math.inf, -1.0, 0.9, 0.7], dtype=torch.float64)
    mask = rules.label_mask(score, rows, levels, allow_empty=True)
    assert torch.equal(mask, rules.all_scores(score, rows) <= levels)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("classes", [2, 3, 7, 10, 33, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_scores_do_not_depend_on_the_company(name: str, classes: int, dtype: torch.dtype) -> None:
    score, rows = SCORES[name], some_rows((3 * normal(90, classes, seed=3)).to(dtype))
    whole = rules.all_scores(score, rows)
    weights = score.weights(rows.logits)
    for size in (1, 2, 7, 64):
        parts = [rows.take(slice(i, i + size)) for i in range(0, 90, size)]
        assert torch.equal(torch.cat([rules.all_scores(score, part) for part in parts]), whole)
    # Another layout in memory is the same numbers.
    turned = rows.logits.t().contiguous().t()
    assert torch.equal(score.weights(turned), weights)
    assert torch.equal(score.weights(torch.nn.functional.pad(rows.logits, (1, 0))[:, 1:]), weights)


@pytest.mark.parametrize("name", SCORES)
def test_the_size_of_blocks_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    score, rows, labels = SCORES[name], some_rows(3 * normal(90, 33, seed=3)), torch.arange(90) % 33

    def everything() -> list[Tensor]:
        scores = rules.label_scores(score, rows, labels)
        mask = rules.label_mask(score, rows, scores.median(), allow_empty=False)
        return [scores, mask, rules.all_scores(score, rows)]

    whole = everything()
    for block in (1, 100, 33 * 89):  # one row, three, and one left over
        monkeypatch.setattr(rules, "_BLOCK", block)
        assert all(map(torch.equal, everything(), whole))


def test_a_tie_at_the_threshold_of_a_saturated_softmax_is_covered() -> None:
    # All scores but those of label 0 are equal: sums that are 1 - 1e-16 in one order and 1 in
    # another would leave labels out.
    logits = torch.full((50, 30), -200.0)
    logits[:, 0] = 200.0
    rows = LabelRows(logits, torch.ones(50, dtype=torch.float64))
    labels = 1 + torch.arange(50) % 29
    scores = rules.label_scores(Cumulative(), rows, labels)
    assert (scores == scores[0]).all()
    assert rules.label_mask(Cumulative(), rows, scores[0], allow_empty=True).all()


@pytest.mark.parametrize("gradient", ["softmax", "feature"])
def test_ffraps_without_delta_is_raps_to_the_bit(gradient: str) -> None:
    rows = some_rows(normal(50, 20, seed=4))
    raps = Cumulative(lam=0.02, kreg=3, temperature=1.2)
    ffraps = Cumulative(lam=0.02, kreg=3, temperature=1.2, delta=0.0, gradient=gradient)
    assert torch.equal(rules.all_scores(ffraps, rows), rules.all_scores(raps, rows))


@given(classes=st.integers(2, 8), spread=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
def test_the_norm_in_closed_form_is_that_of_the_jacobian(classes: int, spread: float) -> None:
    z = spread * normal(classes, seed=classes).double()
    for temperature in (1.0, 2.5):
        jacobian = torch.autograd.functional.jacobian(
            lambda v, t=temperature: (v / t).softmax(dim=0), z
        )
        p = probabilities(z[None], temperature)
        norms = jacobian_norms(p)[0] / temperature
        torch.testing.assert_close(norms, jacobian.norm(dim=1), rtol=1e-6, atol=1e-9)
        weights = Cumulative(temperature, delta=0.5).weights(z[None])[0]
        expected = p[0] + 0.5 * norms
        torch.testing.assert_close(weights.clamp_min(0), expected, rtol=0, atol=2**-40)


def test_the_norms_do_not_depend_on_the_order_of_the_labels() -> None:
    # A sum of squares that rounds would: and with it on how a device adds.
    p = probabilities(3 * normal(50, 1000, seed=7))
    order = torch.randperm(1000)
    assert torch.equal(jacobian_norms(p[:, order]), jacobian_norms(p)[:, order])


def test_weights_are_probabilities_up_to_the_grid() -> None:
    z = 4 * normal(20, 100, seed=5)
    for temperature in (1.0, 0.3, 7.0):
        weights = Cumulative(temperature).weights(z)
        expected = (z.double() / temperature).softmax(dim=1)
        counted = weights.clamp_min(0)
        torch.testing.assert_close(counted, expected, rtol=0, atol=2**-41 + 1e-15)
        assert torch.equal((counted * 2**40).round(), counted * 2**40)
        # What is lost in rounding is as far below as its logarithm says.
        lost = counted == 0
        below = expected.log() - math.log(2**-40)
        torch.testing.assert_close(weights[lost], below[lost].clamp_max(0))


@pytest.mark.parametrize("name", SCORES)
def test_labels_of_hardly_any_probability_are_ordered_by_their_logits(name: str) -> None:
    # Far beyond where float64 itself has probabilities, and between two of the grid.
    logits = torch.tensor([[-900.0, 0.0, -700.0, -40.0, -39.99, -27.72, -27.73, -2000.0]])
    rows = LabelRows(
        logits.repeat(2, 1), torch.tensor([0.3, 0.7], dtype=torch.float64), torch.ones(2)
    )
    scores = rules.all_scores(SCORES[name], rows)
    better = logits.argsort(dim=1, descending=True)
    ordered = scores.gather(1, better.expand(2, -1))
    free = getattr(SCORES[name], "kreg", 0)  # of equal cost
    assert (ordered.diff(dim=1)[:, max(free - 1, 0) :] > 0).all()
    for place in range(free, 8):
        mask = rules.label_mask(SCORES[name], rows, ordered[0, place], allow_empty=True)
        assert set(mask[0].nonzero()[:, 0].tolist()) == set(better[0, : place + 1].tolist())


@pytest.mark.parametrize("spread", [20.0, 200.0])
def test_sets_are_small_though_probabilities_vanish(spread: float) -> None:
    # Labels are not half as sure as the logits say. Without an order among vanishing
    # probabilities LAC would hold all 100 labels, and RAPS and APS many.
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(4000, 100, generator=generator)
    y = torch.multinomial((logits * 8 / spread**2 * 6).softmax(dim=1), 1, generator=generator)
    ranks = (logits >= logits.gather(1, y)).sum(dim=1)
    needed = float(ranks.double().quantile(0.9))
    for make in (ffcp.LAC, ffcp.APS, ffcp.RAPS):
        predictor = make(nn.Identity(), seed=0).calibrate(logits[:2000], y[:2000, 0])
        sets = predictor.predict_set(logits[2000:])
        assert float(sets.sizes.double().mean()) < 1.15 * needed
        assert sets.coverage(y[2000:, 0]) > 0.87


def test_large_logits_do_not_overflow() -> None:
    z = torch.tensor([[1e308, -1e308, 1e308]], dtype=torch.float64)
    for temperature in (1.0, 0.1):
        expected = torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64)
        assert torch.equal(probabilities(z, temperature), expected)


def test_random_shares_do_not_depend_on_batches_and_differ_by_stream_and_seed() -> None:
    def drawn(seed: int, stream: int, rows: range = range(100)) -> Tensor:
        return Draws(seed, stream).span(rows)[:, 0]

    whole = drawn(5, 1)
    assert torch.equal(torch.cat([drawn(5, 1, range(i, i + 10)) for i in range(0, 100, 10)]), whole)
    assert torch.equal(drawn(5, 1, range(40, 100)), whole[40:])
    assert ((whole >= 0) & (whole < 1)).all()
    assert len(whole.unique()) == 100
    for other in (drawn(6, 1), drawn(5, 2)):
        assert not torch.isin(other, whole).any()


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lam": -0.1}, ValueError, "lam"),
        ({"lam": math.nan}, ValueError, "lam"),
        ({"lam": math.inf}, ValueError, "lam"),
        ({"lam": "0.1"}, ValueError, "lam"),
        ({"delta": -1e-9}, ValueError, "delta"),
        ({"delta": math.nan}, ValueError, "delta"),
        ({"delta": 1e5}, ValueError, "delta"),
        ({"delta": 100.0, "temperature": 0.01}, ValueError, "temperature"),
        ({"kreg": -1}, ValueError, "kreg"),
        ({"kreg": 2.0}, TypeError, "kreg"),
        ({"kreg": True}, TypeError, "kreg"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"temperature": math.nan}, ValueError, "temperature"),
        ({"gradient": "logits"}, ValueError, "gradient"),
    ],
)
def test_settings_out_of_range(settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Cumulative(**settings)


# -- the result --------------------------------------------------------------------------------


def test_labels_come_best_first_and_only_when_asked_for() -> None:
    weights = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2]])
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    asked = []

    def blocks():
        asked.append(1)
        yield weights[:2]
        yield weights[2:]

    sets = LabelSet(mask, blocks)
    assert sets.sizes.tolist() == [2, 0, 3]
    assert not asked
    assert [labels.tolist() for labels in sets.labels] == [[1, 0], [], [0, 1, 2]]
    assert len(sets.labels) == len(sets) == 3
    assert len(asked) == 1  # kept after the first time
