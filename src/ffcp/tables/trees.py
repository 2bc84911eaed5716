"""Boosted trees of the target, learned by LightGBM and evaluated as tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.extras import needed
from ffcp.regression.learned import boosting
from ffcp.regression.learned.nested import KNOTS
from ffcp.regression.learned.trees import Trees

_ROUNDS, _PATIENCE = 200, 20
_SETTINGS = {
    "learning_rate": 0.1, "num_leaves": 15, "bagging_fraction": 0.8, "bagging_freq": 1,
    "feature_fraction": 0.8, "deterministic": True, "force_row_wise": True, "verbosity": -1,
}  # fmt: skip
_BOOSTERS = 1 + len(KNOTS)


class TargetTrees(nn.Module):
    """Trees for the mean of the target, and for quantiles of the transformed one at ``KNOTS``.

    ``sizes`` are the numbers of trees, leaves and splits; ``share`` is the weight of the trees in
    the mean and in the quantiles, where the network has the rest.
    """

    share: Tensor

    def __init__(self, sizes: tuple[int, ...], columns: int) -> None:
        super().__init__()
        self.sizes = sizes
        trees, leaves, splits = sizes
        whole = torch.zeros(trees, splits, dtype=torch.int64)
        tensors = {
            "feature": whole,
            "threshold": whole.double(),
            "missing": whole,
            "category": whole,
            "path": torch.zeros(trees, leaves, splits, dtype=torch.int8),
            "value": torch.zeros(trees, leaves, dtype=torch.float64),
            "booster": torch.arange(trees).clamp_max(_BOOSTERS - 1),
            "categories": torch.zeros(1, 1, dtype=torch.bool),
            "columns": torch.tensor([columns]),
        }
        for name, tensor in tensors.items():
            self.register_buffer(f"trees_{name}", tensor.clone())
        self.register_buffer("share", torch.zeros(2, dtype=torch.float64))

    @classmethod
    def of(cls, trees: Trees) -> TargetTrees:
        """Return the module of these trees."""
        state = trees.state()
        module = cls(tuple(state["path"].shape), int(state["columns"]))
        for name, tensor in state.items():
            setattr(module, f"trees_{name}", tensor)
        return module

    def _tensors(self) -> dict[str, Tensor]:
        names = (name for name, _ in self.named_buffers() if name != "share")
        return {name.removeprefix("trees_"): getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise ValueError if the trees are invalid."""
        rounds = Trees.from_state(self._tensors()).rounds
        if len(rounds) != _BOOSTERS:
            raise ValueError(f"expected {_BOOSTERS} boosters, got {len(rounds)}")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (n, 1) and the transformed quantiles (n, knots)."""
        sums = Trees(self._tensors())(x)
        return sums[:, :1], sums[:, 1:].sort(dim=1).values


def learn(
    x: Tensor, y: Tensor, transformed: Tensor, validation: tuple[Tensor, Tensor, Tensor],
    seconds: float, seed: int,
) -> TargetTrees:  # fmt: skip
    """Return trees for the mean of ``y`` and quantiles of the transformed targets.

    ``validation`` are rows for early stopping, with their targets and transformed targets. Every
    booster has its share of the time.
    """
    lightgbm = needed("lightgbm", "tables", "ffcp fit")
    begin = time.monotonic()
    dumps: list[dict[str, Any]] = []
    settings = {
        **_SETTINGS, "min_data_in_leaf": max(5, min(40, len(x) // 40)), "seed": seed % 2**31,
        "num_threads": boosting.threads_for(len(x)),
    }  # fmt: skip
    x_stop, y_stop, transformed_stop = validation
    mean = [{"objective": "l2"}]
    quantiles = [{"objective": "quantile", "alpha": level} for level in KNOTS.tolist()]
    for target, target_stop, losses in (
        (y, y_stop, mean), (transformed, transformed_stop, quantiles)
    ):  # fmt: skip
        data = lightgbm.Dataset(x.numpy(), target.double().numpy())
        check = lightgbm.Dataset(x_stop.numpy(), target_stop.double().numpy(), reference=data)
        for loss in losses:
            end = begin + seconds * (len(dumps) + 1) / _BOOSTERS
            callbacks = [lightgbm.early_stopping(_PATIENCE, verbose=False), _until(end, lightgbm)]
            booster = lightgbm.train(
                {**settings, **loss}, data, _ROUNDS, valid_sets=[check], callbacks=callbacks
            )
            dumps.append(booster.dump_model())
    return TargetTrees.of(Trees.from_dumps(dumps, x.shape[1]))


def _until(end: float, lightgbm: Any) -> Callable[[Any], None]:
    """Return a callback that ends a training at a point in time."""

    def stop(env: Any) -> None:
        if time.monotonic() > end:
            raise lightgbm.callback.EarlyStopException(env.iteration, env.evaluation_result_list)

    return stop
