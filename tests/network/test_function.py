"""What a calibration belongs to: the function that the model computed, by all that it rests on."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal

X = normal(400, 3, seed=0)
NOISE = normal(400, seed=1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def targets(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(X)[:, 0].detach() + 0.1 * NOISE


def reduced() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "CP": lambda model: ffcp.CP(model),
    "FFCP": lambda model: ffcp.FFCP(model, "0"),
    "LCP": lambda model: ffcp.LCP(model, ffcp.Localizer("box", on="input", bandwidth=2.0), seed=0),
}


@pytest.mark.parametrize("method", ["CP", "FFCP", "LCP"])
def test_another_autocast_is_refused_wherever_scores_meet_predictions(
    method: str, tmp_path: Path
) -> None:
    model = net()
    make, y = METHODS[method], targets(model)
    plain = make(model).calibrate(X[:200], y[:200])
    with reduced():
        cast = make(model).calibrate(X[200:], y[200:])
        cast.predict_interval(X[:5])
        cast.score(X[:5], y[:5])
        for refused in (
            lambda: plain.predict_interval(X[:5]),
            lambda: plain.score(X[:5], y[:5]),
            lambda: plain.calibrate(X[200:], y[200:], update=True),
            lambda: ffcp.Online(plain).predict_interval(X[:5]),
            lambda: copy.deepcopy(plain).predict_interval(X[:5]),
            lambda: pickle.loads(pickle.dumps(plain)).predict_interval(X[:5]),
        ):
            with pytest.raises(RuntimeError, match="autocast"):
                refused()
    plain.predict_interval(X[:5])
    with pytest.raises(RuntimeError, match="autocast"):
        cast.predict_interval(X[:5])
    with pytest.raises(RuntimeError, match="autocast"):
        plain.merge(cast)
    with pytest.raises(RuntimeError, match="autocast"):
        make(model).merge(cast).predict_interval(X[:5])
    cast.save(tmp_path / "cast")
    loaded = make(model).load(tmp_path / "cast")
    with pytest.raises(RuntimeError, match="autocast"):
        loaded.predict_interval(X[:5])
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="autocast"):
        loaded.predict_interval(X[:5])
    with reduced():
        loaded.predict_interval(X[:5])


def test_each_thread_has_an_autocast_of_its_own() -> None:
    model, raised = net(), list[BaseException]()
    with reduced():
        predictor = ffcp.CP(model).calibrate(X, targets(model))

        def ask() -> None:
            try:
                predictor.predict_interval(X[:5])
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert "autocast" in str(raised[0])


def test_another_autocast_is_refused_for_folds(tmp_path: Path) -> None:
    model, other = net(), net()
    y, folds = targets(model), torch.arange(400) % 2
    with reduced():
        cross = ffcp.CrossBands([model, other], folds).calibrate(X, y)
        cross.save(tmp_path / "folds")
    loaded = ffcp.CrossBands.load(tmp_path / "folds", [model, other])
    for one in (cross, loaded):
        with pytest.raises(RuntimeError, match="autocast"):
            one.predict_interval(X[:5])
        with reduced():
            one.predict_interval(X[:5])


def test_autocast_does_not_matter_where_nothing_is_computed() -> None:
    with reduced():
        stored = ffcp.CP(ffcp.Stored()).calibrate(X[:, :1], X[:, 0] + NOISE)
    stored.predict_interval(X[:5, :1])
