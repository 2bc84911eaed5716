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
from tests.test_threads import together

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
    with pytest.raises(ValueError, match=r"LazyLinear"):
        ffcp.CP(lazy)
    lazy(X)
    assert torch.isfinite(ffcp.CP(lazy).calibrate(X, Y)(X).lower).all()
    with pytest.raises(ValueError, match=r"FSDP"):
        ffcp.CP(FullyShardedDataParallel(nn.Linear(4, 1)))


def test_hooks_that_change_something_are_part_of_the_function() -> None:
    model = plain().eval()
    model[1].register_forward_hook(lambda module, x, out: 3 * out)

    def doubled(module: nn.Module, x: Any, out: Tensor) -> None:
        out.mul_(2)  # it returns nothing, and changes the output all the same

    model[3].register_forward_hook(doubled)
    with torch.no_grad():
        expected = model(X)
    for predictor in (ffcp.CP(model), ffcp.FFCP(model, "0")):
        predictor.calibrate(X, Y)
        torch.testing.assert_close(predictor.predict_interval(X).prediction, expected[:, 0])


def looked_at(model: nn.Sequential) -> list[str]:
    """Put hooks of every kind that only look on a model; they note themselves in the list."""
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda module, x: seen.append("pre"))
    model[0].register_forward_pre_hook(
        lambda module, x, named: seen.append("pre with names"), with_kwargs=True
    )
    model[0].register_forward_hook(lambda module, x, out: seen.append("out"))
    model[3].register_full_backward_hook(lambda module, down, up: seen.append("back"))
    model[3].register_full_backward_pre_hook(lambda module, up: seen.append("before back"))
    model[0].weight.register_hook(lambda grad: seen.append("weight"))
    return seen


@pytest.mark.parametrize("method", ["CP", "FFCP", "FCP", "LCP"])
def test_hooks_that_only_look_change_nothing(method: str) -> None:
    model = plain()
    seen, expected = looked_at(model), ffcp.CP(plain()).calibrate(X, Y)
    make = getattr(ffcp, method)
    predictor = make(model, "0") if method.startswith("F") else make(model)
    predictor.calibrate(X, Y)
    prediction = predictor.predict_interval(X).prediction
    predictor.score(X, Y)
    assert {"pre", "pre with names", "out"} <= set(seen)  # the model itself is run
    assert "weight" not in seen
    torch.testing.assert_close(prediction, expected.predict_interval(X).prediction)
    seen.clear()
    model(X).sum().backward()
    assert len(seen) == 6  # all of them are still there


def test_a_backward_hook_that_changes_gradients_is_no_part_of_the_function() -> None:
    model = plain()
    band = ffcp.FFCP(model, "0").calibrate(X, Y).predict_interval(X)
    model[3].register_full_backward_hook(lambda module, down, up: (0 * down[0],))
    assert torch.equal(ffcp.FFCP(model, "0").calibrate(X, Y).predict_interval(X).upper, band.upper)


def test_hooks_on_the_way_in_that_change_what_goes_in_are_part_of_the_function() -> None:
    model = plain().eval()
    model[0].register_forward_pre_hook(lambda module, x: (2 * x[0],))
    with torch.no_grad():
        expected = model(X)
    for predictor in (ffcp.CP(model), ffcp.FFCP(model, "0")):
        torch.testing.assert_close(predictor.calibrate(X, Y)(X).prediction, expected[:, 0])


def test_hooks_count_as_they_were_when_calibrating() -> None:
    model = plain().eval()
    predictor = ffcp.CP(model).calibrate(X, Y)
    before = predictor(X)
    changes = model[3].register_forward_hook(lambda module, x, out: 5 * out)
    with pytest.raises(RuntimeError, match="hooks"):
        predictor(X)
    later = ffcp.CP(model).calibrate(X, Y)
    torch.testing.assert_close(later(X).prediction, 5 * before.prediction)
    changes.remove()
    assert torch.equal(predictor(X).upper, before.upper)
    with pytest.raises(RuntimeError, match="hooks"):
        later(X)


def test_bands_are_given_while_a_model_with_hooks_is_calibrated() -> None:
    model = plain().eval()
    model[3].register_forward_hook(lambda module, x, out: 3 * out)
    predictor = ffcp.FFCP(model, "0").calibrate(X, Y)
    expected = predictor(X)

    def ask() -> None:
        for _ in range(40):
            assert torch.equal(predictor(X).upper, expected.upper)

    def again() -> None:
        for _ in range(10):
            ffcp.FFCP(model, "0").calibrate(X, Y)

    assert not together(ask, ask, again, again)


def test_a_loaded_predictor_has_the_hooks_of_its_model(tmp_path: Any) -> None:
    expected = ffcp.FFCP(plain(), "0").calibrate(X, Y)
    expected.save(tmp_path / "one")
    model = plain()
    looked_at(model)
    torch.testing.assert_close(ffcp.load(tmp_path / "one", model)(X).upper, expected(X).upper)


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
    with pytest.raises(ValueError, match="random"):
        ffcp.CP(make()).calibrate(X, Y)
