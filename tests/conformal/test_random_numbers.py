"""Random numbers that belong to rows."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import ffcp
from ffcp.conformal.kernels import as_kernel
from ffcp.conformal.random_numbers import Draws

FAR = 2**18  # from here on each draw has a seed of its own


STREAM = 3


def drawn_at_once(kernel: str, seed: int, rows: int, width: int) -> Tensor:
    """Draw the steps of all rows in one go, 128 at a time."""
    random, parts = np.random.default_rng([seed, STREAM]), []
    for start in range(0, rows, 128):
        count = min(128, rows - start)
        normal = random.standard_normal((count, width))
        if kernel != "gaussian":
            normal /= np.linalg.norm(normal, axis=1, keepdims=True)
        if kernel == "laplace":
            normal *= random.gamma(width, 1.0, (count, 1))
        elif kernel == "box":
            normal *= random.random((count, 1)) ** (1 / width)
        parts.append(normal)
    return torch.from_numpy(np.concatenate(parts))


@pytest.mark.parametrize(
    ("kernel", "rows"), [("gaussian", 1), ("gaussian", 300), ("laplace", 256), ("box", 384)]
)
@pytest.mark.parametrize("seed", [0, 5])
def test_steps_are_those_of_one_draw(kernel: str, rows: int, seed: int) -> None:
    steps = Draws(seed, 3).by(as_kernel(kernel).steps, torch.arange(rows), 3)
    assert torch.equal(steps, drawn_at_once(kernel, seed, rows, 3))


def test_steps_are_not_the_numbers_of_data_drawn_with_the_same_seed() -> None:
    steps = Draws(0, STREAM).by(as_kernel("gaussian").steps, torch.arange(128), 3)
    data = torch.from_numpy(np.random.default_rng(0).standard_normal((128, 3)))
    assert not torch.isin(steps, data).any()


@pytest.mark.parametrize("kernel", ["laplace", "box"])
def test_lengths_of_an_unfinished_draw_are_others(kernel: str) -> None:
    # In one go they would depend on how many rows were asked with a row, and cannot belong to it.
    steps = Draws(0, 3).by(as_kernel(kernel).steps, torch.arange(300), 3)
    before = drawn_at_once(kernel, 0, 300, 3)
    assert torch.equal(steps[:256], before[:256])
    assert not (steps[256:] == before[256:]).all(dim=1).any()
    length, length_before = steps.norm(dim=1, keepdim=True), before.norm(dim=1, keepdim=True)
    assert torch.allclose(steps / length, before / length_before)


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
@pytest.mark.parametrize("first", [0, 1000, FAR - 100, FAR + 5, 2**60])
def test_a_row_has_its_steps_however_rows_are_asked_for(kernel: str, first: int) -> None:
    rows, draw = torch.arange(first, first + 200), as_kernel(kernel).steps
    draws = Draws(7, 3)
    if first < FAR - 1000:
        whole = draws.by(draw, rows, 2)
    else:  # and whoever asks first
        draws.by(draw, rows[-1:], 2)
        whole = draws.by(draw, rows, 2)
    assert torch.equal(torch.cat([draws.by(draw, row, 2) for row in rows.split(1)]), whole)
    order = torch.from_numpy(np.random.default_rng(0).permutation(200))
    assert torch.equal(draws.by(draw, rows[order], 2), whole[order])
    assert len(whole.unique(dim=0)) == 200
    others = (Draws(8, 3).by(draw, rows, 2), draws.by(draw, rows + 200, 2))
    assert not any(torch.equal(whole, other) for other in others)


def test_steps_far_away_have_the_law_of_the_first() -> None:
    draw = as_kernel("gaussian").steps
    steps = Draws(0, 3).by(draw, torch.arange(FAR, FAR + 20_000), 3)
    assert float(steps.square().mean()) == pytest.approx(1, abs=0.03)
    assert float(steps.mean().abs()) < 0.03


def test_threads_share_a_series() -> None:
    @dataclass
    class Slow(ffcp.kernels.Kernel):
        """A kernel that cannot be hashed, and lets other threads in before it draws."""

        name: str = "slow"

        def steps(self, random: np.random.Generator, rows: int, dimensions: int) -> Tensor:
            time.sleep(1e-3)
            return torch.from_numpy(random.standard_normal((rows, dimensions)))

    draw, draws = Slow().steps, Draws(11, 3)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda rows: draws.by(draw, rows, 2), torch.arange(4000).split(37)))
    assert torch.equal(torch.cat(parts), drawn_at_once("gaussian", 11, 4000, 2))
