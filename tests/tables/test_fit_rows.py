"""Rows of a fit are known again, by hashes of all or of some of them; fresh rows are not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pandas")
import torch

from ffcp.regression.learned.training_rows import row_hashes
from ffcp.tables import fit_rows


def _rows(values: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(values).float()
    return row_hashes(x, x[:, 0])


def test_of_many_rows_some_hashes_tell_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_rows, "_KEPT", 500)
    draw = np.random.default_rng(0)
    of_fit, fresh = (_rows(draw.standard_normal((10_000, 3))) for _ in range(2))
    kept = fit_rows.keep(of_fit, np.arange(8_000))
    assert len(kept) == 500
    for share in (0.0, 0.5, 1.0):
        count = int(4_000 * share)
        mixed = torch.cat([of_fit[:count], fresh[: 4_000 - count]])
        assert fit_rows.share(kept, mixed) == pytest.approx(share, abs=0.12)
    assert fit_rows.share(kept, of_fit[:20]) == 0.0  # hardly one of them has a hash that is kept


@pytest.mark.parametrize("kinds", [3, 100, 1_000, 30_000])
def test_fresh_rows_of_a_table_that_repeats_are_not_taken_for_those_of_the_fit(kinds: int) -> None:
    draw = np.random.default_rng(0)
    of_fit, fresh = (_rows(draw.integers(0, kinds, (1_000, 1))) for _ in range(2))
    assert fit_rows.share(fit_rows.keep(of_fit, np.arange(1_000)), fresh) < 0.42
