"""Label sets are found in steps of many sizes; the steps change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ffcp
from ffcp.classification import rules
from ffcp.classification.rules import Cumulative, LabelRows, label_mask
from tests.conftest import normal


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize("shape", [(), (30, 1)])
def test_few_labels_at_a_time_give_the_same_sets(
    shape: tuple[int, ...], allow_empty: bool, monkeypatch
) -> None:
    logits = normal(30, 40, seed=1).round()  # many ties
    rows = LabelRows(logits, torch.rand(30, dtype=torch.float64))
    threshold = torch.rand(shape, dtype=torch.float64)
    rule = Cumulative(lam=0.001, kreg=2)
    whole = label_mask(rule, rows, threshold, allow_empty=allow_empty)
    monkeypatch.setattr(rules, "_SORTED", 0)
    monkeypatch.setattr(rules, "_FEW", 1)
    assert label_mask(rule, rows, threshold, allow_empty=allow_empty).equal(whole)
    monkeypatch.setattr(rules, "_BLOCK", 100)  # two rows
    assert label_mask(rule, rows, threshold, allow_empty=allow_empty).equal(whole)


def test_one_row_is_as_one_of_many() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    share = torch.zeros(2, dtype=torch.float64)
    for level in (0.0, 0.3, 0.6, 0.9):
        threshold = torch.tensor(level, dtype=torch.float64)
        both = label_mask(Cumulative(), LabelRows(logits, share), threshold, allow_empty=True)
        for row in range(2):
            own = LabelRows(logits[row : row + 1], share[:1])
            assert label_mask(Cumulative(), own, threshold, allow_empty=True)[0].equal(both[row])
    none = torch.tensor(-1.0, dtype=torch.float64)
    assert not label_mask(Cumulative(), own, none, allow_empty=True).any()


def test_a_gradient_that_drowns_the_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        Cumulative(delta=1e30)


def test_what_a_score_is_made_with_can_be_read() -> None:
    given = ffcp.FFRAPS(nn.Linear(2, 3), delta=0.02, lam=0.1, kreg=1, temperature=1.5)
    assert (given.delta, given.lam, given.kreg, given.temperature) == (0.02, 0.1, 1, 1.5)
    still_open = ffcp.FFRAPS(nn.Linear(2, 3), temperature="fit")
    assert still_open.temperature is None
    tuned = ffcp.FFRAPS(nn.Linear(2, 3), tune="size")
    assert tuned.delta is tuned.lam is tuned.kreg is None
