"""Bands of a graph hold the library's, whatever the numbers."""

from __future__ import annotations

import pytest
import torch

import ffcp
from ffcp.batch import BatchOutput, traced
from ffcp.export.steps import Outward, rounding_share
from ffcp.network.jacobian.norms import wide
from ffcp.regression.scaled_score import ScaledScore

ROWS = 4000


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Draw numbers of all sizes, zero among them."""
    sizes = torch.empty(shape).uniform_(-12, 12) if dtype != torch.float16 else torch.zeros(shape)
    return (torch.randn(shape) * 10**sizes * (torch.rand(shape) < 0.9)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["both", "lower", "upper", "each"])
@pytest.mark.parametrize("base", [ffcp.scores.Point(), ffcp.scores.Quantiles()])
def test_ends_lie_outside_of_the_librarys_and_hardly_farther(dtype, side, base):
    outputs = 2 if isinstance(base, ffcp.scores.Quantiles) else 1
    output, norms = numbers(dtype, ROWS, outputs), numbers(wide(dtype), ROWS, outputs).abs()
    seen = BatchOutput(None, output, {"0": norms}, {}, range(ROWS))
    bands = ScaledScore(base, ffcp.scales.GradientNorm("0"), side=side)
    lowest = 0.0 if bands.lowest == 0 else -3.0
    for score in (lowest, 0.0, 6e-46, 1 / 3, 2.7, 1e300, torch.inf):
        threshold = torch.full((2 if side == "each" else 1,), score, dtype=torch.float64)
        known = bands.region(seen, threshold)
        with traced():
            # The least that is allowed for: see checking.rounding_of_intervals.
            least = torch.tensor(4 * torch.finfo(dtype).tiny, dtype=dtype)
            larger = threshold + threshold.abs() * rounding_share(dtype)
            ends = Outward(bands).region(seen, larger)
            lower, upper = ((ends[0] - least).to(dtype), (ends[1] + least).to(dtype))
        assert bool((lower <= known[0]).all())
        assert bool((upper >= known[1]).all())
        size = torch.stack([*known, output[:, :1], output[:, -1:]]).double().abs().amax(dim=0)
        if abs(score) < 1e300:
            scale = norms.double().amax(dim=1, keepdim=True)
            step = size + abs(score) * (scale + 1e-6)
            allowed = 60 * torch.finfo(dtype).eps * step + float(least) * (10 + scale)
            wider = torch.maximum(known[0].double() - lower, upper.double() - known[1])
            assert bool((wider.nan_to_num(0, 0, 0) <= allowed).all())


def test_a_nan_stays_a_nan_at_both_ends():
    seen = BatchOutput(None, torch.tensor([[torch.nan]]), {}, {}, range(1))
    for side in ("both", "lower"):
        outward = Outward(ScaledScore(ffcp.scores.Point(), ffcp.scales.Constant(), side=side))
        assert all(end.isnan().all() for end in outward.region(seen, torch.ones(1).double()))
