"""Trees as tensors give what LightGBM gives, missing values and categories included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ffcp.regression.learned.trees import Trees

lightgbm = pytest.importorskip("lightgbm")


def table(rows: int = 800) -> tuple[np.ndarray, np.ndarray]:
    """Four columns of numbers, one of zeros and others, and one of twelve categories."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6))
    x[:, 4] *= rng.random(rows) < 0.5
    x[:, 5] = rng.integers(0, 12, rows)
    y = x[:, 0] * x[:, 1] + x[:, 5] % 3 + np.abs(x[:, 4]) + 0.1 * rng.normal(size=rows)
    return x, y


def spoiled(x: np.ndarray) -> np.ndarray:
    """Return rows with NaN, zeros, negative and unknown categories here and there."""
    rng = np.random.default_rng(1)
    odd = (np.nan, 0.0, -0.5, -3.5, 99.0, 1e-36, np.inf)
    return np.vstack([x, *(np.where(rng.random(x.shape) < 0.2, one, x) for one in odd)])


def boosted(x: np.ndarray, y: np.ndarray, categorical: Any = "auto", **settings: Any) -> Any:
    given = {"verbosity": -1, "num_leaves": 15, "min_data_in_leaf": 5, "num_threads": 1, **settings}
    return lightgbm.train(given, lightgbm.Dataset(x, y, categorical_feature=categorical), 40)


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "numbers": (False, {}),
    "a quantile": (False, {"objective": "quantile", "alpha": 0.9}),
    "missing values": (True, {}),
    "zeros are missing": (True, {"zero_as_missing": True}),
    "no missing values": (False, {"use_missing": False}),
    "categories": (False, {"categorical": [5]}),
    "sets of categories": (
        True,
        {"categorical": [5], "max_cat_to_onehot": 1, "min_data_per_group": 1, "cat_smooth": 1},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_sums_are_those_of_lightgbm(kind: str) -> None:
    has_missing, settings = CASES[kind]
    x, y = table()
    if has_missing:
        x = np.where(np.random.default_rng(2).random(x.shape) < 0.2, np.nan, x)
    booster, new = boosted(x, y, **settings), spoiled(x)
    trees = Trees.from_dumps([booster.dump_model()], x.shape[1])
    expected = torch.from_numpy(booster.predict(new))
    for one in (trees, Trees.from_state(trees.state())):
        own = one(torch.from_numpy(new))[:, 0]
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def test_several_boosters_are_summed_apart_and_one_leaf_is_a_tree() -> None:
    x, y = table()
    boosters = [boosted(x, y), boosted(x, np.zeros(len(x))), boosted(x, -y)]
    trees = Trees.from_dumps([one.dump_model() for one in boosters], 6)
    expected = np.stack([one.predict(x) for one in boosters], axis=1)
    torch.testing.assert_close(trees(torch.from_numpy(x)), torch.from_numpy(expected))
    assert trees.rounds == [one.num_trees() for one in boosters]


@pytest.mark.parametrize("name", ["feature", "missing", "category", "booster"])
@pytest.mark.parametrize("value", [-1, 9999])
def test_trees_that_ask_for_what_is_not_there_are_refused(name: str, value: int) -> None:
    x, y = table(200)
    state = Trees.from_dumps([boosted(x, y, categorical=[5]).dump_model()], 6).state()
    state[name] = state[name].clone()
    state[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=name):
        Trees.from_state(state)
