"""What a calibration belongs to: the function that the model computed, by all that it rests on."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.network.hidden_weights import unlisted
from ffcp.network.model import checked_autocast
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
    "LCP": lambda model: ffcp.LCP(
        model, ffcp.kernels.Localizer("box", on="input", bandwidth=2.0), seed=0
    ),
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
        cross = ffcp.CrossConformal([model, other], folds).calibrate(X, y)
        cross.save(tmp_path / "folds")
    loaded = ffcp.CrossConformal.load(tmp_path / "folds", [model, other])
    for one in (cross, loaded):
        with pytest.raises(RuntimeError, match="autocast"):
            one.predict_interval(X[:5])
        with reduced():
            one.predict_interval(X[:5])


def test_autocast_does_not_matter_where_nothing_is_computed() -> None:
    with reduced():
        stored = ffcp.CP(ffcp.Stored()).calibrate(X[:, :1], X[:, 0] + NOISE)
    stored.predict_interval(X[:5, :1])


class Adapter:
    """A hook that is an object, with weights in a module, a list and by itself."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.parts = [nn.Linear(3, 8, bias=False)]

    def __call__(self, module: nn.Module, x: Any, out: Tensor) -> Tensor:
        return out + self.parts[0](x[0])

    def method(self, module: nn.Module, x: Any, out: Tensor) -> Tensor:
        return self(module, x, out)


def adapted(lora: nn.Module, module: nn.Module, x: Any, out: Tensor) -> Tensor:
    added: Tensor = lora(x[0])
    return out + added


LORA = nn.Linear(3, 8, bias=False)


def with_global(module: nn.Module, x: Any, out: Tensor) -> Tensor:
    added: Tensor = LORA(x[0])
    return out + added


def hooked(kind: str) -> tuple[nn.Module, Callable[[], Any]]:
    """Make a model with a hook that has weights of its own, and what trains them."""
    model, lora, adapter = net(), nn.Linear(3, 8, bias=False), Adapter()
    raw = normal(8, 3, seed=2)
    hooks: dict[str, Any] = {
        "closure": lambda module, x, out: out + lora(x[0]),
        "tensor": lambda module, x, out: out + x[0] @ raw.T,
        "partial": functools.partial(adapted, lora),
        "object": adapter,
        "method": adapter.method,
        "global": with_global,
    }
    model[0].register_forward_hook(hooks[kind])
    others = {"closure": lora.weight, "tensor": raw, "partial": lora.weight, "global": LORA.weight}
    weight = others.get(kind, adapter.parts[0].weight)
    return model, lambda: written(weight)


def written(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(normal(*weight.shape, seed=3))


class Around(nn.Module):
    """Holds its layers where torch does not look."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        held: dict[str, Any] = {
            "attribute": net(),
            "list": [net()],
            "dict": {"one": net()},
            "parameters": [nn.Parameter(normal(1, 3, seed=4))],
            "function": functools.partial(nn.Sequential.forward, net()),
        }
        self.__dict__["inner"] = held[kind]

    @property
    def layers(self) -> Any:
        inner: Any = self.__dict__["inner"]
        kinds = {"list": lambda: inner[0], "dict": lambda: inner["one"]}
        return kinds.get(self.kind, lambda: inner)()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "parameters":
            return x @ self.layers[0].T
        out: Tensor = self.layers(x)
        return out


def around(kind: str) -> tuple[nn.Module, Callable[[], Any]]:
    model = Around(kind)
    held = {
        "parameters": lambda: model.layers[0],
        "function": lambda: model.layers.args[0][2].weight,
    }
    return model, lambda: written(held.get(kind, lambda: model.layers[2].weight)())


def born_in_inference_mode() -> tuple[nn.Module, Callable[[], Any]]:
    with torch.inference_mode():
        model = net()

    def change() -> None:
        with torch.inference_mode():
            model[2].weight.mul_(2)

    return model, change


HIDDEN: dict[str, Callable[[], tuple[nn.Module, Callable[[], Any]]]] = {
    **{f"hook: {k}": functools.partial(hooked, k) for k in ("closure", "tensor", "partial")},
    **{f"hook: {k}": functools.partial(hooked, k) for k in ("object", "method", "global")},
    **{k: functools.partial(around, k) for k in ("attribute", "list", "dict", "parameters")},
    "function": functools.partial(around, "function"),
    "inference mode": born_in_inference_mode,
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_weights_that_torch_does_not_list_are_seen_to_change(kind: str, tmp_path: Path) -> None:
    model, change = HIDDEN[kind]()
    y = targets(model)
    predictor = ffcp.CP(model).calibrate(X[:200], y[:200])
    band = predictor.predict_interval(X[200:])
    assert band.contains(y[200:]).double().mean() > 0.8
    predictor.save(tmp_path / "saved")
    torch.testing.assert_close(ffcp.load(tmp_path / "saved", model)(X[200:]).upper, band.upper)
    with torch.no_grad():
        model(X)  # a pass of the user's own changes nothing
    torch.testing.assert_close(predictor.predict_interval(X[200:]).upper, band.upper)
    change()
    with pytest.raises(RuntimeError, match="weights"):
        predictor.predict_interval(X[200:])
    with pytest.raises(RuntimeError, match="weights"):
        predictor.save(tmp_path / "other")
    with pytest.raises(ffcp.CalibrationFileError, match="weights"):
        ffcp.load(tmp_path / "saved", model)
    again = ffcp.CP(model).calibrate(X[:200], targets(model)[:200])
    with torch.no_grad():
        torch.testing.assert_close(again(X[200:]).prediction, model(X[200:])[:, 0])


def test_what_passes_record_is_no_weight() -> None:
    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last, self.all = net(), None, []

        def forward(self, x: Tensor) -> Tensor:
            self.last = out = self.body(x)
            self.all.append(out.detach())
            return out

    model, seen = Recorded(), {}
    model.body[0].register_forward_hook(lambda module, x, out: seen.update(last=out))
    predictor = ffcp.CP(model).calibrate(X, targets(model))
    expected = predictor.predict_interval(X)
    model(2 * X)
    assert torch.equal(predictor.predict_interval(X).upper, expected.upper)


def nonlocal_record() -> Any:
    last = torch.zeros(1)

    def hook(module: nn.Module, x: Any, out: Tensor) -> None:
        nonlocal last
        last = out.detach()

    return hook


def global_record(module: nn.Module, x: Any, out: Tensor) -> None:
    global LAST
    LAST = out.detach()


LAST = torch.zeros(1)


@pytest.mark.parametrize("hook", [nonlocal_record(), global_record])
def test_a_tensor_that_a_hook_assigns_is_no_weight(hook: Any) -> None:
    model = net()
    model[0].register_forward_hook(hook)
    predictor = ffcp.CP(model).calibrate(X, targets(model))
    expected = predictor.predict_interval(X)
    model(2 * X)
    assert torch.equal(predictor.predict_interval(X).upper, expected.upper)


def test_a_hook_that_writes_to_its_own_tensor_is_named_where_it_is_refused() -> None:
    model, total = net(), torch.zeros(())
    model[0].register_forward_hook(lambda module, x, out: total.add_(1) and None)
    with pytest.raises(RuntimeError, match="hook"):
        ffcp.CP(model).calibrate(X, targets(model))


class Lazy:
    """What loads when it is looked at, and fails."""

    def __getattribute__(self, name: str) -> Any:
        raise OSError("the server is away")


class ClaimsToBe:
    __class__ = dict  # type: ignore[assignment]


class Attributes:
    def __init__(self) -> None:
        self.__dict__.update({1: 2, "a": 3})  # type: ignore[dict-item]


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize("make", [Lazy, ClaimsToBe, Attributes, lambda: nested(5000)])
def test_whatever_a_hook_holds_can_be_looked_through(make: Callable[[], Any]) -> None:
    model, held = net(), make()
    model[0].register_forward_hook(lambda module, x, out: (id(held), None)[1])
    predictor = ffcp.CP(model).calibrate(X, targets(model))
    assert predictor.predict_interval(X).upper.isfinite().all()


def test_nested_data_is_not_looked_through() -> None:
    model = net()
    model.history = [[[0.0]] * 900 for _ in range(900)]
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        found = unlisted(model)
    finally:
        sys.setprofile(None)
    assert not found
    assert calls < 20_000
    model.layers = [[nn.Linear(1, 1)], {"a": (nn.Linear(1, 1),)}]
    assert [name for name, _ in unlisted(model)] == ["layers.0.0", "layers.1.0.0"]


@pytest.mark.parametrize("kind", ["cpu", "cpu float3", "cpu bfloat16, ", " bfloat16", "\x00"])
def test_an_autocast_that_cannot_be_is_refused(kind: str) -> None:
    assert checked_autocast("cpu bfloat16, cuda float16") == "cpu bfloat16, cuda float16"
    with pytest.raises(ValueError, match="autocast"):
        checked_autocast(kind)
