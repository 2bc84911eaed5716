"""Rows that are set aside to choose: which ones, how many, and that they do not calibrate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ffcp.conformal.columns import Columns
from ffcp.conformal.selection import Division, Selection

fractions = st.floats(0.01, 0.99)


@pytest.mark.long
@given(
    fraction=fractions,
    seed=st.integers(0, 100),
    most=st.integers(0, 60),
    early=st.integers(0, 100),
    cuts=st.lists(st.integers(0, 50), min_size=1, max_size=6),
)
def test_the_division_depends_on_the_position_alone(
    fraction: float, seed: int, most: int, early: int, cuts: list[int]
) -> None:
    division = Division(fraction, seed, most, early)
    whole = division.mask(range(sum(cuts)))
    parts, start = [], 0
    for rows in cuts:
        parts.append(division.mask(range(start, start + rows)))
        start += rows
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.long
@given(start=st.integers(0, 10**7), seed=st.integers(0, 5))
def test_a_worker_knows_its_rows_without_those_before(start: int, seed: int) -> None:
    division = Division(0.2, seed, most=10**7)
    rows = range(start, start + 40)
    with_some_before = division.mask(range(start - min(start, 9), rows.stop))
    assert torch.equal(with_some_before[-40:], division.mask(rows))
    assert 7 <= int(division.mask(rows).sum()) <= 9


@pytest.mark.long
@given(
    fraction=fractions, seed=st.integers(0, 9), most=st.integers(0, 60), early=st.integers(0, 100)
)
def test_no_more_rows_than_allowed_are_set_aside(
    fraction: float, seed: int, most: int, early: int
) -> None:
    division = Division(fraction, seed, most, early)
    rows = division.end + 100
    mask = division.mask(range(rows))
    assert int(mask.sum()) <= most
    assert not mask[division.end :].any()


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_the_division_takes_the_asked_share(fraction: float) -> None:
    for most in (30, 10_000):
        mask = Division(fraction, 0, most).mask(range(1000))
        assert int(mask.sum()) == min(most, round(1000 * fraction))


@pytest.mark.parametrize(("fraction", "at_first"), [(0.1, 0.2), (0.25, 0.5), (0.5, 0.5), (1, 1)])
def test_twice_the_share_of_early_rows_is_set_aside_and_at_most_half(
    fraction: float, at_first: float
) -> None:
    mask = Division(fraction, 0, 10_000, early=1000).mask(range(3000))
    assert int(mask[:1000].sum()) == 1000 * at_first
    assert int(mask[1000:].sum()) == 2000 * fraction


def test_another_seed_divides_otherwise() -> None:
    one, two = (Division(0.2, seed, most=100).mask(range(100)) for seed in (0, 1))
    assert not torch.equal(one, two)


@pytest.mark.long
@pytest.mark.parametrize("fraction", [0.1, 0.2])
def test_every_row_is_as_likely_to_be_set_aside(fraction: float) -> None:
    masks = torch.stack([Division(fraction, seed, 99).mask(range(20)) for seed in range(2000)])
    torch.testing.assert_close(
        masks.double().mean(dim=0), torch.full((20,), fraction).double(), rtol=0, atol=0.04
    )


# -- the loop ----------------------------------------------------------------------------------


class Recorder:
    """Notes numbers, and records what the loop asks of it."""

    def __init__(self, can_do_without: bool = False) -> None:
        self.can_do_without = can_do_without
        self.aside: list[float] | None = None
        self.left: int | None = None
        self.is_chosen = False

    def record(self, batch: Tensor) -> dict[str, Tensor]:
        return {"number": batch, "before": torch.full_like(batch, not self.is_chosen)}

    def choose(self, aside: Columns, left: int) -> None:
        assert not self.is_chosen
        self.is_chosen, self.aside, self.left = True, aside["number"].tolist(), left

    def select_without_rows(self, rows: int) -> bool:
        self.is_chosen = self.can_do_without
        return self.can_do_without

    def finish(self, noted: Columns) -> Columns:
        assert self.is_chosen or self.aside is None
        return noted


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
@pytest.mark.parametrize("most", [10, 1000])
def test_every_row_chooses_or_is_kept_in_its_order(size: int, most: int) -> None:
    work, division = Recorder(), Division(0.2, seed=0, most=most)
    selection = Selection(work, division, 0.1)
    rows = torch.arange(300.0)
    kept = selection.run(rows.split(size))["number"]
    mask = division.mask(range(300))
    assert torch.equal(kept, rows[~mask])
    assert work.aside == rows[mask].tolist()
    assert selection.set_aside == int(mask.sum())
    assert work.left <= len(kept)


def test_a_long_stream_does_not_wait_for_its_end() -> None:
    work = Recorder()
    columns = Selection(work, Division(0.2, seed=0, most=10), 0.1).run(torch.zeros(300).split(20))
    assert int(columns["before"].sum()) == 60 - 10  # 60 rows until 10 were set aside for sure


def test_with_nothing_open_all_rows_are_kept() -> None:
    selection = Selection(Recorder(), None, 0.1)
    assert len(selection.run(torch.arange(9.0).split(4))["number"]) == 9
    assert selection.set_aside == 0


@pytest.mark.parametrize("rows", range(1, 9))
def test_few_rows_are_all_kept_if_nothing_needs_to_be_chosen(rows: int) -> None:
    work = Recorder(can_do_without=True)
    selection = Selection(work, Division(0.2, seed=0, most=100), 0.1)
    assert len(selection.run([torch.zeros(rows)])["number"]) == rows
    assert (work.aside, selection.set_aside) == (None, 0)


def test_rows_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="1 rows cannot be divided into some that choose and some"):
        Selection(Recorder(), Division(0.2, seed=0, most=100), 0.1).run([torch.zeros(1)])


@pytest.mark.parametrize("division", [None, Division(0.2, seed=0, most=9)])
def test_no_rows_at_all(division: Division | None) -> None:
    with pytest.raises(ValueError, match="calibration data is empty"):
        Selection(Recorder(), division, 0.1).run([])
