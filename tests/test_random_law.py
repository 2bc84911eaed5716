"""Randomised methods asked one row at a time, as every server asks: they cover as promised."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.law import ERROR_RATE, p_value, upper_p_value

ROWS, ASKED, REPEATS, ALPHA = 60, 8, 50, 0.1


def logits(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(rows, 5, generator=generator)
    return x, torch.multinomial(x.softmax(dim=1), 1, generator=generator)[:, 0]


def noise(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, generator=generator)
    return x, x[:, 0] + (0.2 + x[:, 0].abs()) * torch.randn(rows, generator=generator)


SETS: dict[str, Callable[..., ffcp.SetPredictor]] = {
    "APS": lambda seed: ffcp.APS(nn.Identity(), allow_zero_sets=True, seed=seed),
    "RAPS": lambda seed: ffcp.RAPS(nn.Identity(), allow_zero_sets=True, seed=seed),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", SETS)
def test_label_sets_cover_one_row_at_a_time(name: str) -> None:
    """The whole law: were all rows given one random number, only its spread would show it."""
    hits, calibrated = [], 0
    for repeat in range(4 * REPEATS):
        x, y = logits(ROWS + ASKED, seed=repeat)
        predictor = SETS[name](repeat).calibrate(x[:ROWS], y[:ROWS])
        calibrated = len(predictor.calibration)
        masks = torch.cat([predictor.predict_set(x[i : i + 1], ALPHA).mask for i in rows()])
        hits.append(int(masks.gather(1, y[ROWS:, None]).sum()))
    rank = ffcp.conformal_rank(calibrated, ALPHA)
    assert p_value(hits, ASKED, calibrated, rank) > ERROR_RATE


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
def test_localized_bands_cover_one_row_at_a_time(kernel: str) -> None:
    near, hits = ffcp.kernels.Localizer(kernel, on="input", bandwidth=1.5), []
    for repeat in range(REPEATS):
        x, y = noise(ROWS + ASKED, seed=repeat)
        predictor = ffcp.LCP(nn.Identity(), near, guarantee="random", seed=repeat)
        predictor.calibrate(x[:ROWS], y[:ROWS])
        inside = 0
        for i in rows():
            band = predictor.predict_interval(x[i : i + 1], ALPHA)
            inside += int(band.contains(y[i : i + 1]))
        hits.append(inside)
    assert upper_p_value(hits, ASKED, ROWS, ffcp.conformal_rank(ROWS, ALPHA)) > ERROR_RATE


def rows() -> range:
    return range(ROWS, ROWS + ASKED)


def ready(seed: int | None) -> ffcp.APS:
    x, y = logits(200, seed=0)
    return ffcp.APS(nn.Identity(), seed=seed).calibrate(x, y)


def test_numbers_go_on_from_call_to_call() -> None:
    x, _ = logits(50, seed=1)
    one_by_one, whole, pinned = ready(3), ready(3), ready(3)
    parts = [one_by_one.predict_set(row).mask for row in x.split(1)]
    assert torch.equal(torch.cat(parts), whole.predict_set(x).mask)
    assert torch.equal(pinned.predict_set(x, first_row=0).mask, torch.cat(parts))
    assert not torch.equal(whole.score_all(x), whole.score_all(x))
    assert torch.equal(
        pinned.score_all(x[20:], first_row=20), pinned.score_all(x, first_row=0)[20:]
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
def test_pinned_bands_do_not_depend_on_how_rows_are_asked_for(kernel: str) -> None:
    x, y = noise(500, seed=0)
    localizer = ffcp.kernels.Localizer(kernel, on="input", bandwidth=1.0)
    predictor = ffcp.LCP(nn.Identity(), localizer, guarantee="random").calibrate(x[:300], y[:300])
    new = x[300:]
    whole = predictor.predict_interval(new, first_row=70).upper
    one_by_one = [
        predictor.predict_interval(row, first_row=70 + i).upper
        for i, row in enumerate(new.split(1))
    ]
    assert torch.equal(torch.cat(one_by_one), whole)
    loader = ((part,) for part in new.split(33))
    assert torch.equal(predictor.predict_interval(loader, first_row=70).upper, whole)
    assert not torch.equal(predictor.predict_interval(new, first_row=0).upper, whole)
    assert not torch.equal(predictor.predict_interval(new).upper, whole)


def test_without_a_seed_predictors_and_their_copies_differ() -> None:
    x, _ = logits(50, seed=1)
    one = ready(None)
    others: list[Any] = [ready(None), copy.deepcopy(one), pickle.loads(pickle.dumps(one))]
    assert all(not torch.equal(one.score_all(x), other.score_all(x)) for other in others)
    assert torch.equal(one.score_all(x, first_row=0), others[1].score_all(x, first_row=0))


def test_workers_without_a_seed_merge() -> None:
    assert len(ready(None).merge(ready(None)).calibration) == 400
    with pytest.raises(ValueError, match="seed 3"):
        ready(3).merge(ready(3))
