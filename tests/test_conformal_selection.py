"""Conformal selection: the false discovery rate as a law, exact counting, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.conformal.p_values import benjamini_hochberg
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE

FDR, ROWS, ASKED, REPEATS = 0.2, 199, 40, 400  # FDR (ROWS + 1) / ASKED is a whole number


class First(nn.Module):
    """Predicts the first column."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1]


def at_most(shares: list[float], rate: float) -> bool:
    """Whether a mean share of false discoveries agrees with a rate, at ERROR_RATE."""
    error = max(1e-9, np.std(shares, ddof=1) / np.sqrt(len(shares)))
    return bool(stats.norm.sf((np.mean(shares) - rate) / error) > ERROR_RATE)


def false_shares(
    predictor: Any,
    sample: Callable[[torch.Generator], tuple[Tensor, Tensor]],
    is_true: Callable[[Tensor], Tensor],
    **asked: Any,
) -> tuple[list[float], float]:
    """Return the share of false discoveries in each draw, and the share of true rows found."""
    generator, shares, found = torch.Generator().manual_seed(1), [], []
    for _ in range(REPEATS):
        x, y = sample(generator)
        predictor.calibrate(x[:ROWS], y[:ROWS])
        selected = ffcp.conformal_selection(predictor, x[ROWS:], fdr=FDR, **asked).selected
        true = is_true(y[ROWS:])
        shares.append(float((selected & ~true).sum()) / max(1, int(selected.sum())))
        found.append(float((selected & true).sum()) / max(1, int(true.sum())))
    return shares, float(np.mean(found))


def signal(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS + ASKED, 2, generator=generator)
    return x, x[:, 0] + 0.3 * torch.randn(len(x), generator=generator)


def no_signal(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, _ = signal(generator)
    return x, torch.randn(len(x), generator=generator)


def all_false(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Targets at the number that they are to exceed: every selection is false."""
    x, _ = signal(generator)
    return x, torch.zeros(len(x))


@pytest.mark.heavy
@pytest.mark.parametrize("make", [ffcp.CP, ffcp.FFCP])
@pytest.mark.parametrize("sample", [signal, no_signal, all_false])
def test_the_false_discovery_rate_is_at_most_what_is_asked(make: Any, sample: Any) -> None:
    options = {"feature": "input"} if make is ffcp.FFCP else {}
    predictor = make(First(), side="lower", **options)
    shares, found = false_shares(predictor, sample, lambda y: y > 0, above=0.0)
    assert at_most(shares, FDR)
    if sample is all_false:  # every row is ranked at random: the rate is reached exactly
        assert stats.binomtest(int(sum(shares)), REPEATS, FDR).pvalue > ERROR_RATE
    assert (found > 0.05) == (sample is signal)


@pytest.mark.heavy
def test_a_clipped_target_keeps_the_rate_and_finds_more() -> None:
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = signal(generator)
        return x, torch.where(y > 0, 1e6, 0.0)

    predictor = ffcp.CP(First(), side="lower")
    plain = false_shares(predictor, signal, lambda y: y > 0, above=0.0)[1]
    shares, found = false_shares(predictor, sample, lambda y: y > 0, above=0.0)
    assert at_most(shares, FDR)
    assert found > 1.2 * plain


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["LAC", "APS"])
@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_the_false_discovery_rate_of_a_label_is_at_most_what_is_asked(
    name: str, strength: float
) -> None:
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 3 * torch.randn(ROWS + ASKED, 3, generator=generator)
        law = (strength * x / 3).softmax(dim=1)
        return x, torch.multinomial(law, 1, generator=generator)[:, 0]

    predictor = getattr(ffcp, name)(nn.Identity(), seed=0)
    shares, found = false_shares(predictor, sample, lambda y: y == 2, label=2)
    assert at_most(shares, FDR)
    assert (found > 0.05) == (strength > 0)


def test_p_values_rank_the_number_among_calibration_scores() -> None:
    x, y = signal(torch.Generator().manual_seed(2))
    predictor = ffcp.CP(First(), side="lower").calibrate(x[:ROWS], y[:ROWS])
    limits = torch.linspace(-1, 1, ASKED)
    found = ffcp.conformal_selection(predictor, x[ROWS:], above=limits)
    scores = predictor.score(x[:ROWS], y[:ROWS])
    at = predictor.score(x[ROWS:], limits)
    expected = (1 + (scores[None] >= at[:, None]).sum(dim=1)).double() / (ROWS + 1)
    assert torch.equal(found.p_values, expected)
    # A p-value is at most alpha where the lower limit at this level exceeds the number.
    lower = predictor.predict_interval(x[ROWS:], alpha=0.1).lower
    assert torch.equal(found.p_values <= 0.1, lower > limits)


def test_labels_are_selected_where_no_other_is_left() -> None:
    x = 3 * normal(300, 3, seed=3)
    y = torch.distributions.Categorical(logits=x).sample()
    predictor = ffcp.LAC(nn.Identity(), names=["a", "b", "c"]).calibrate(x[:200], y[:200])
    found = ffcp.conformal_selection(predictor, x[200:], label="c")
    assert torch.equal(found.p_values, predictor.p_values(x[200:])[:, :2].amax(dim=1))
    assert torch.equal(
        found.selected, ffcp.conformal_selection(predictor, x[200:], label=2).selected
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_procedure_is_that_of_benjamini_and_hochberg(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, of = random.integers(1, 101, size=random.integers(1, 30)), 100
    fdr = Fraction(int(random.integers(1, 20)), 20)
    p = [Fraction(int(rank), of) for rank in ranks]
    rejected = max(
        (r for r in range(1, len(p) + 1) if sorted(p)[r - 1] <= fdr * r / len(p)), default=0
    )
    most = sorted(p)[rejected - 1] if rejected else Fraction(-1)
    found = benjamini_hochberg(torch.from_numpy(ranks), of, fdr)
    assert found.tolist() == [one <= most for one in p]


def test_all_else_is_refused_with_its_reason() -> None:
    x, y, labels = normal(60, 4, seed=4), normal(60, seed=5), torch.arange(60) % 3
    lower = ffcp.CP(small_mlp(), side="lower")
    select = ffcp.conformal_selection
    with pytest.raises(RuntimeError, match="calibrate"):
        select(lower, x, above=0.0)
    lower.calibrate(x, y)
    assert select(lower, x, above=0.0, fdr=0.5).selected.shape == (60,)
    for arguments in ({}, {"above": 0.0, "label": 1}):
        with pytest.raises(TypeError, match="above="):
            select(lower, x, **arguments)
    with pytest.raises(TypeError, match="label="):
        select(lower, x, label=1)
    with pytest.raises(TypeError, match="arrays"):
        select(lower, iter([x]), above=0.0)
    with pytest.raises(ValueError, match="fdr"):
        select(lower, x, above=0.0, fdr=1.5)
    for side in ("both", "upper", "each"):
        with pytest.raises(ValueError, match="side='lower'"):
            select(ffcp.CP(small_mlp(), side=side).calibrate(x, y), x, above=0.0)
    two = ffcp.CP(small_mlp(outputs=2), side="lower").calibrate(x, x[:, :2])
    with pytest.raises(ValueError, match="one output"):
        select(two, x, above=0.0)
    weighted = ffcp.calibrations.Weighted(lambda x: (0.1 * x[:, 0]).exp())
    for other in (
        ffcp.CP(small_mlp(), side="lower").calibrate(x, y, groups=["a", "b"] * 30),
        ffcp.CP(small_mlp(), side="lower", calibration=weighted).calibrate(x, y),
        ffcp.CP(small_mlp(), side="lower").calibrate(x, y).compress(0.1),
        ffcp.LCP(small_mlp(), side="lower").calibrate(x, y),
    ):
        with pytest.raises(ValueError, match="Marginal"):
            select(other, x, above=0.0)
    sets = ffcp.LAC(small_mlp(outputs=3)).calibrate(x, labels)
    with pytest.raises(TypeError, match="intervals"):
        select(sets, x, above=0.0)
    for label in (3, -1, "cat", True, 1.0):
        with pytest.raises(ValueError, match="label"):
            select(sets, x, label=label)
    with pytest.raises(TypeError, match="VennAbers"):
        select(ffcp.VennAbers(small_mlp(outputs=3)), x, label=1)


@pytest.mark.parametrize("make", [ffcp.CP, ffcp.FFCP, ffcp.CQR, ffcp.Learned])
def test_scores_of_lower_limits_fall_where_targets_grow(make: Any) -> None:
    options = {"feature": "0"} if make is ffcp.FFCP else {}
    outputs = 2 if make is ffcp.CQR else 1
    x, y = normal(300, 4, seed=6), normal(300, seed=7)
    predictor = make(small_mlp(outputs=outputs), side="lower", **options).calibrate(x, y)
    at = [predictor.score(x[:50], torch.full((50,), c)) for c in (-3.0, -1.0, 0.0, 0.5, 2.0, 9.0)]
    assert bool((torch.stack(at).diff(dim=0) <= 0).all())
