"""Localized thresholds in a file are the library's, at every point of the line."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

import ffcp
from ffcp.export import line
from ffcp.export.share import Share
from ffcp.pieces import Seen


@pytest.mark.long
@pytest.mark.parametrize("guarantee", ["level", "none"])
@pytest.mark.parametrize("neighbours", [25, 120])  # some, and all
@pytest.mark.parametrize("is_tied", [False, True])
def test_thresholds_are_the_librarys_on_both_sides_of_every_edge(
    guarantee, neighbours, is_tied, monkeypatch
):
    monkeypatch.setattr(line, "_UNITS", 0)  # no rounding of another machine
    generator = torch.Generator().manual_seed(0)
    places = torch.randn(120, 1, generator=generator)
    scores = torch.rand(120, 2, generator=generator).double() * (0.1 + places.abs())
    if is_tied:
        places, scores = (20 * places).round() / 20, (20 * scores).round() / 20
    local = ffcp.Local(ffcp.Localizer(bandwidth=neighbours), guarantee)
    local.add(scores, {"embedding": places})
    look_up = line.OnALine(local)
    edges = look_up._edges()
    before = line._in_order(line._number(edges) - 1)
    far = torch.tensor([-1e30, 0.0, 1e30])
    x = torch.cat([edges, before, places[:, 0], far])[:, None]
    seen = Seen(None, x, {}, {}, range(len(x)))
    for alpha in (Fraction(1, 100), Fraction(1, 10), Fraction(2, 5)):
        known = local.threshold(alpha, {"embedding": x})
        millionths = torch.tensor(int(alpha * 10**6))
        for share in (Share(alpha), Share(millionths)):
            assert torch.equal(look_up(share)(seen, None), known)


def test_the_largest_threshold_within_rounding_is_taken():
    places = torch.arange(60.0)[:, None]
    local = ffcp.Local(ffcp.Localizer(bandwidth=20), "none")
    local.add(places.double() ** 2, {"embedding": places})
    look_up = line.OnALine(local)
    look_up._off = 0.25
    x = torch.linspace(-5, 70, 1501)[:, None]
    near = [{"embedding": x + move} for move in (-0.24, 0.0, 0.24)]
    largest = torch.stack([local.threshold(0.1, notes) for notes in near]).amax(dim=0)
    seen = Seen(None, x, {}, {}, range(len(x)))
    made = look_up(Share(Fraction(1, 10)))(seen, None)
    assert bool((made >= largest).all())
    assert float((made > largest).double().mean()) < 0.05
