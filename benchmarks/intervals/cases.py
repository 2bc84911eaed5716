"""The cases: data sets and series with the paper's networks, synthetic problems, and images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ffcp_paper.data import images
from ffcp_paper.data import result_cache as runs
from ffcp_paper.data.datasets import Split, Table, split
from ffcp_paper.experiments.studies import Study
from ffcp_paper.experiments.tasks import TRAINED, Settings, Training
from ffcp_paper.networks import pretrained as vision
from ffcp_paper.networks.regression import mlp
from ffcp_paper.training.regression import train, train_as_published

ALPHA = 0.1
DATA = (
    "com", "bike", "bio", "star", "synthetic", "fb1", "blog", "kin8nm", "power_plant", "naval",
    "wine", "airfoil", "california", "king_county", "meps_2006",
)  # fmt: skip
SERIES = ("metro_traffic", "tetuan_power")
IMAGES = "size of compressed images"
QUANTILES = Training("quantiles", (ALPHA / 2, 1 - ALPHA / 2))
SETTINGS = Settings(rows=20_000)  # the most rows of a data set
_VERSION = 1  # of synthetic problems and images


class Loaded(NamedTuple):
    """Rows as they are divided, the network, and, if it is known, how noisy each test row is."""

    parts: Split
    model: nn.Sequential
    noise: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A data set or problem, and a seed: the rows as they are divided, and a network."""

    data: str
    seed: int

    @property
    def parts(self) -> Split:
        return loaded(self).parts

    @property
    def model(self) -> nn.Sequential:
        return loaded(self).model

    def quantile_network(self) -> nn.Module:
        """Return the paper's network for two quantiles, trained on the same rows."""
        return Study(self.data, SETTINGS).networks(QUANTILES, [self.seed])[0]


@lru_cache(maxsize=1)
def loaded(case: Case) -> Loaded:
    """Read the rows and the network of a case; what is not in the cache is trained."""
    if case.data in PROBLEMS:
        return _problem(case)
    if case.data == IMAGES:
        return _images(case)
    study = Study(case.data, SETTINGS)
    (model,) = study.networks(TRAINED, [case.seed])
    assert isinstance(model, nn.Sequential)
    return Loaded(study.parts(case.seed), model)


# -- three synthetic problems ----------------------------------------------------------------------

Array = np.ndarray[Any, Any]
_ROWS, _TEST = 800, 4000  # that train, as many that calibrate; that test


def _ignored(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    scale = 0.1 + 1.5 * np.abs(x[:, 0])
    return np.sin(3 * x[:, 1]) + x[:, 2] + scale * rng.normal(size=len(x)), scale


def _level(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    mean = np.exp(x[:, 0] + x[:, 1])
    scale = 0.05 + 0.4 * mean
    return mean + scale * rng.normal(size=len(x)), scale


def _interaction(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    scale = 0.3 + 1.2 * (x[:, 0] * x[:, 1] > 0) * np.abs(x[:, 2])
    return 2 * x[:, 3] + scale * (rng.exponential(size=len(x)) - 1), scale


PROBLEMS: dict[str, Callable[[Array, np.random.Generator], tuple[Array, Array]]] = {
    "noise in an input that the mean ignores": _ignored,
    "noise grows with the level": _level,
    "skewed noise, an interaction": _interaction,
}


def _problem(case: Case) -> Loaded:
    """Draw the rows of a synthetic problem, and train a small network on them."""
    rng = np.random.default_rng(case.seed)
    drawn: list[Tensor] = []
    noise: Array = np.empty(0)
    for rows in (_ROWS, _ROWS, _TEST):
        x = rng.uniform(-1, 1, (rows, 5))
        y, noise = PROBLEMS[case.data](x, rng)
        drawn += [torch.from_numpy(x).float(), torch.from_numpy(y).float()]
    parts = Split(*drawn)
    key = {"version": _VERSION, "problem": case.data, "seed": case.seed}

    def trained() -> nn.Module:
        return train(
            _small(case.seed), parts.x_train, parts.y_train[:, None], epochs=60,
            learning_rate=3e-3, weight_decay=1e-4, seed=case.seed,
        )  # fmt: skip

    model = runs.network(key, lambda: _small(case.seed), trained)
    assert isinstance(model, nn.Sequential)
    return Loaded(parts, model, torch.from_numpy(noise))


def _small(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )


# -- images ----------------------------------------------------------------------------------------


def has_images() -> bool:
    """Whether the features of images, and the images themselves, are there."""
    return vision.NETWORKS["resnet152"].available and images.IMAGENET_FILE.found is not None


def _images(case: Case) -> Loaded:
    """Train a head on stored features of a ResNet-152 for the bytes that an image takes as WebP."""
    stored = vision.NETWORKS["resnet152"].inputs()
    offsets = images.arrays(images.read(images.IMAGENET_FILE))["offset"]
    x = stored.batch(0, len(stored.labels)).numpy()
    table = Table(x, np.diff(offsets).astype(np.float32), tuple(map(str, range(x.shape[1]))))
    parts = split(table, case.seed)
    key = {"version": _VERSION, "images": "bytes", "seed": case.seed}

    def trained() -> nn.Module:
        return train_as_published(
            parts.x_train, parts.y_train, seed=case.seed, epochs=200, patience=20
        )

    model = runs.network(key, lambda: mlp(x.shape[1]), trained)
    assert isinstance(model, nn.Sequential)
    return Loaded(parts, model)


# -- how long learning takes -----------------------------------------------------------------------


def large(train_rows: int = 20_000, calibration_rows: int = 8_000, columns: int = 60) -> Loaded:
    """Draw many rows whose noise depends on the input, with a network that is trained a little."""
    rng = np.random.default_rng(0)
    drawn = []
    for rows in (train_rows, calibration_rows, 100):
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        y = x[:, :5].sum(axis=1) + (0.2 + np.abs(x[:, 5])) * rng.standard_normal(rows)
        drawn += [torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))]
    parts = Split(*drawn)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(columns)
    train(model, parts.x_train, parts.y_train[:, None], epochs=3)
    return Loaded(parts, model)
