"""Plain stacks are run and differentiated by hand: the same numbers, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.network import forward
from ffcp.network.cut import Cut
from ffcp.network.jacobian.dispatch import exact
from ffcp.network.jacobian.stack import Stack, by_hand
from ffcp.network.model import borrowed

ACTIVATIONS = (
    nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.GELU(),
    nn.GELU(approximate="tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(2.0, 3.0),
)  # fmt: skip


def by_graph(model: nn.Module, x: Tensor, names: list[str], norm: float) -> dict[str, Tensor]:
    with Cut(model, names) as cut:
        return exact(cut(x), norm)


def network(activation: nn.Module, outputs: int = 1, last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), activation, nn.Dropout(),
        nn.Sequential(nn.Linear(7, 6), nn.Tanh()), nn.Linear(6, outputs), last or nn.Identity(),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("norm", [1, 2, float("inf")])
def test_norms_are_those_of_torch_to_the_last_bit(
    activation: nn.Module, outputs: int, norm: float
) -> None:
    model, x = network(activation, outputs), torch.randn(11, 5)
    names = ["input", "0", "2", "3", "3.0"]
    stack = Stack.of(model)
    assert stack is not None
    output, norms = stack.run(x, names, norm)
    with torch.no_grad():
        assert output.equal(model(x))
    # Several outputs go through torch's graph in one batched pass, which rounds in another way.
    expected = by_graph(model, x, names, norm)
    for name in names:
        if outputs == 1:
            assert norms[name].equal(expected[name])
        else:
            torch.testing.assert_close(norms[name], expected[name])


@pytest.mark.parametrize("last", [nn.Softplus(), nn.Sigmoid(), nn.Sequential(nn.Tanh(), nn.ReLU())])
def test_an_activation_may_come_last(last: nn.Module) -> None:
    model, x = network(nn.ReLU(), 2, last), torch.randn(9, 5)
    stack = Stack.of(model)
    assert stack is not None
    _, norms = stack.run(x, ["0"], 2)
    torch.testing.assert_close(norms["0"], by_graph(model, x, ["0"], 2)["0"])


@pytest.mark.parametrize("names", [["4"], ["0", "5"]])
def test_the_last_layer_may_be_a_feature(names: list[str]) -> None:
    model, x = network(nn.ReLU()), torch.randn(9, 5)
    _, norms = ffcp.gradient_norms(model, x, features=names)
    for name, expected in by_graph(model, x, names, 2).items():
        torch.testing.assert_close(norms[name], expected)


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _hooked() -> nn.Module:
    model = network(nn.ReLU())
    model[0].register_forward_hook(lambda module, args, value: 2 * value)
    return model


def _patched() -> nn.Module:
    model = network(nn.ReLU())
    plain = model[0].forward
    model[0].forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    return model


def _twice() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(5, 1))


@pytest.mark.parametrize(
    "model",
    [
        _hooked(),
        _patched(),
        _twice(),
        nn.Sequential(_Doubled(5, 1)),
        nn.Sequential(nn.Linear(5, 6), nn.SiLU(inplace=True), nn.Linear(6, 1)),
        nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 1)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 1))),
        nn.Sequential(nn.ReLU()),
    ],
    ids=lambda model: "-".join(type(layer).__name__ for layer in model),
)
def test_what_is_more_than_its_type_says_is_left_to_torch(model: nn.Module) -> None:
    assert Stack.of(model) is None


def test_hooks_of_the_user_count_in_bands() -> None:
    """A hook that changes a layer is part of the function, also if it comes to a plain stack."""
    x, y = torch.randn(200, 5), torch.randn(200)
    plain, hooked = network(nn.ReLU()), _hooked()
    bands = [ffcp.FFCP(m, "0").calibrate(x, y).predict_interval(x) for m in (plain, hooked)]
    assert not torch.allclose(bands[0].prediction, bands[1].prediction)
    torch.testing.assert_close(bands[1].prediction, hooked(x).detach()[:, 0])


def test_a_hook_on_all_modules_is_called() -> None:
    model, x = network(nn.ReLU()), torch.randn(4, 5)
    before = forward.run_batch(model, x).output
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, value: value + 1 if isinstance(module, nn.Linear) else None
    )
    try:
        after = forward.run_batch(model, x).output
        expected = model(x).detach()
    finally:
        handle.remove()
    assert after.equal(expected)
    assert not after.equal(before)


def test_a_forward_exchanged_for_all_layers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(nn.ReLU()), torch.randn(4, 5)
    plain = nn.Linear.forward
    forward.run_batch(model, x)  # reads the twin
    monkeypatch.setattr(nn.Linear, "forward", lambda self, value: 2 * plain(self, value))
    assert forward.run_batch(model, x).output.equal(model(x).detach())


def test_autocast_is_left_to_torch() -> None:
    model, x = network(nn.ReLU()), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        seen = forward.run_batch(model, x, forward.Requires(norms=("0",)))
    assert seen.output.dtype == torch.bfloat16


def test_rows_of_another_width_are_counted() -> None:
    with pytest.raises(ValueError, match="x has 3 columns, the model takes 5"):
        forward.run_batch(network(nn.ReLU()), torch.randn(4, 3))


def test_a_twin_is_read_once_and_a_model_never(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, made = network(nn.ReLU()), torch.randn(4, 5), []
    read = Stack.of
    monkeypatch.setattr(Stack, "of", lambda given: made.append(given) or read(given))
    assert by_hand(model, x, [], ffcp.Requires()) is None
    with borrowed(model) as frozen:
        for _ in range(2):
            assert by_hand(frozen, x, [], ffcp.Requires()) is not None
        assert made == [frozen]
    assert not any(name.startswith("_ffcp") for name in model.__dict__)


def test_quantile_networks_agree_with_torch_in_bands() -> None:
    """Two outputs by hand, and the same model wrapped so that torch's graph is taken."""

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = network(nn.ReLU(), 2).double()
    x, y = torch.randn(300, 5).double(), torch.randn(300).double()
    by_hand = ffcp.FFCQR(model, "0").calibrate(x, y).predict_interval(x)
    by_torch = ffcp.FFCQR(Wrapped(model), "inner.0").calibrate(x, y).predict_interval(x)
    torch.testing.assert_close(by_hand.lower, by_torch.lower, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_hand.upper, by_torch.upper, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [3, 2000])  # of few rows x itself is looked at
@pytest.mark.parametrize("first", [[], [nn.Sigmoid()]], ids=["linear first", "activation first"])
@pytest.mark.parametrize("feature", [None, "input"])
def test_what_is_no_number_is_seen_wherever_it_stands(
    bad: float, rows: int, first: list[nn.Module], feature: str | None
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 7)
    with torch.no_grad():
        layer.weight[:, 2] = 0  # nothing depends on this column
        layer.weight[:, 3] = -1  # and behind ReLU nothing on an infinite number in this one
        layer.weight[:, 4] = 0.5
    model = nn.Sequential(*first, layer, nn.ReLU(), nn.Linear(7, 1))
    requires = ffcp.Requires(norms=(feature,)) if feature else ffcp.Requires()
    for column in range(5):
        x = torch.randn(rows, 5)
        assert forward.run_batch(model, x, requires).output.isfinite().all()
        x[rows - 1, column] = bad
        with pytest.raises(ValueError, match=rf"^x .*{bad}.*row {10 + rows - 1} "):
            forward.run_batch(model, x, requires, first_row=10)


def test_numbers_that_overflow_in_the_first_layer_are_no_reason_to_refuse_x() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Sigmoid(), nn.Linear(7, 1))
    x = torch.full((2000, 5), 3e38)
    with torch.no_grad():
        model[0].weight.fill_(2)
        assert model[0](x).isinf().all()
    assert forward.run_batch(model, x).output.isfinite().all()
