"""What a model may do that a private copy of it must bear: hooks, buffers, odd modules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal

X, Y = normal(60, 4, seed=0), normal(60, seed=1)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


class WritesBuffer(nn.Module):
    def __init__(self, rebinds: bool = False) -> None:
        super().__init__()
        self.layer, self.rebinds, self.calls = nn.Linear(4, 1), rebinds, 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.rebinds:
            self.count = self.count + 1
        else:
            self.count += 1
        return self.layer(x)


class Locked(nn.Module):
    """No copy can be made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(4, 1), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.layer(x)


def normed(kind: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = plain()
        kind(model[0])
        return model

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "writes a buffer": WritesBuffer,
    "binds a buffer anew": lambda: WritesBuffer(rebinds=True),
    "cannot be copied": Locked,
    "old weight norm": normed(nn.utils.weight_norm),
    "new weight norm": normed(nn.utils.parametrizations.weight_norm),
    "old spectral norm": normed(nn.utils.spectral_norm),
    "new spectral norm": normed(nn.utils.parametrizations.spectral_norm),
    "DataParallel": lambda: nn.DataParallel(plain()),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)),
}


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return [
        [t.tolist() for t in tensors],
        [(t._version, t.requires_grad, t.data_ptr()) for t in tensors],
        [m.training for m in model.modules()],
        hooks,
        getattr(model, "calls", 0),
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_no_model_is_touched(name: str) -> None:
    model = MODELS[name]().train()
    before = state(model)
    for predictor in (ffcp.CP(model), ffcp.FFCP(model, "input")):
        band = predictor.calibrate(X, Y).predict_interval(X)
        assert torch.equal(band.lower, predictor.predict_interval(X).lower)
    assert state(model) == before


class FullyShardedDataParallel(nn.Sequential):
    """Named as that of torch, which needs a group of processes to be made."""


def test_models_whose_weights_are_not_here_are_refused_when_a_predictor_is_made() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"without weights yet \(LazyLinear\): run it once"):
        ffcp.CP(lazy)
    lazy(X)
    assert torch.isfinite(ffcp.CP(lazy).calibrate(X, Y)(X).lower).all()
    with pytest.raises(ValueError, match=r"divided over processes \(FSDP\)"):
        ffcp.CP(FullyShardedDataParallel(nn.Linear(4, 1)))


def test_hooks_that_only_look_see_the_users_passes_and_those_that_change_stay() -> None:
    model, seen = plain().eval(), []
    model[0].register_forward_hook(lambda module, x, out: seen.append(len(out)))
    model[1].register_forward_hook(lambda module, x, out: 3 * out)

    def doubled(module: nn.Module, x: Any, out: Tensor) -> None:
        out.mul_(2)  # it returns nothing, and changes the output all the same

    model[3].register_forward_hook(doubled)
    with torch.no_grad():
        expected = model(X)
    for predictor in (ffcp.CP(model), ffcp.FFCP(model, "0")):
        predictor.calibrate(X, Y)
        seen.clear()
        torch.testing.assert_close(predictor.predict_interval(X).prediction, expected)
        assert not seen
    model(X)
    assert seen == [60]


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] + torch.rand(len(x))


class TurnsOnTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.body.train()(x)


@pytest.mark.parametrize("make", [Random, TurnsOnTraining])
def test_models_that_draw_random_numbers_in_eval_mode_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="random even in eval mode"):
        ffcp.CP(make()).calibrate(X, Y)
