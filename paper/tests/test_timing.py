"""How many times faster: intervals hold the truth, and rounds end when they are narrow."""

from __future__ import annotations

import numpy as np
import pytest

from ffcp_paper.experiments import timing


@pytest.mark.parametrize("rounds", [6, 15, 40])
def test_the_interval_holds_the_median_as_often_as_it_says(rounds: int) -> None:
    # Noise as machines have it: skewed, with a long tail. The median of exp(N(0, 1)) is 1.
    draws = np.exp(np.random.default_rng(0).standard_normal((2000, rounds)))
    intervals = [timing.ratio(values, 0.05) for values in draws.tolist()]
    missed = sum(not one.low <= 1 <= one.high for one in intervals)
    assert missed <= 0.05 * 2000 + 3 * (0.05 * 0.95 * 2000) ** 0.5  # more: 1 in 700


def test_too_few_rounds_have_no_interval() -> None:
    with pytest.raises(ValueError, match=r"\b5\b"):
        timing.ratio([1.0] * 5, 0.05)


def repeated(noise: float, most: int) -> dict[str, list[float]]:
    random = np.random.default_rng(0)

    def one_round() -> dict[str, float]:
        return {"slow": 20 * float(np.exp(noise * random.standard_normal())), "fast": 1.0}

    return timing.repeated(one_round, "slow", "fast", 0.05, most)


def test_rounds_go_on_until_the_ratio_is_stable() -> None:
    quiet, loud = repeated(0.01, 1000), repeated(0.2, 1000)
    assert len(quiet["slow"]) == len(quiet["fast"]) == timing.rounds_needed(0.05)
    assert len(loud["slow"]) == 503  # halfway
    assert timing.ratio(loud["slow"], 0.05).is_stable
    # There is an end to it, but never less than an interval needs.
    assert len(repeated(0.2, 10)["slow"]) == 10
    assert len(repeated(0.2, 1)["slow"]) == 6


def test_stopping_when_the_interval_is_narrow_keeps_its_promise() -> None:
    # Ratios in two clusters: rounds that happen to hit one of them look stable, and are wrong.
    # Looking after every round, at the full error each time, would miss in one of ten.
    random = np.random.default_rng(0)

    def stopped() -> timing.Ratio:
        shifts = iter(random.choice([0.94, 0.95, 1.05, 1.06], size=25).tolist())
        rounds = timing.repeated(
            lambda: {"slow": next(shifts), "fast": 1.0}, "slow", "fast",
            timing.error_of_look(1), 25,
        )  # fmt: skip
        return timing.of_seeds([rounds], "slow", "fast")[1]

    found = [stopped() for _ in range(2000)]
    missed = sum(not one.low <= 1 <= one.high for one in found)
    assert missed <= 0.05 * 2000


def test_the_mean_over_seeds_has_the_ends_of_its_seeds() -> None:
    seeds = [{"slow": [s * k for k in range(1, 9)], "fast": [1.0] * 8} for s in (1.0, 3.0)]
    each, mean = timing.of_seeds(seeds, "slow", "fast")
    assert [one.middle for one in each] == [4.5, 13.5]
    assert mean == timing.Ratio(9.0, 2.0, 16.0)
