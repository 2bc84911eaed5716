"""Gradient norms against torch.func.jacrev, and the model left as it was."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import ffcp
from tests.network.record import Record

NORMS = [1, 2, math.inf]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 2)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        v = self.norm(self.stem(x))
        # The branch first: the in-place ReLU then works on the feature itself.
        v = v + self.conv(torch.tanh(v))
        return self.head(self.act(v).mean(dim=(2, 3)))


class Block(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.layer(self.embed(x)).mean(dim=1))
        return out if out.shape[1] > 1 else out[:, 0]


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(2, 4, 3), nn.GELU(), nn.Conv1d(4, 3, 3, stride=2), nn.Tanh(),
            nn.Flatten(), nn.Linear(9, 2),
        )  # fmt: skip


def mlp_inplace() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 7), nn.ELU(inplace=True),
        nn.Linear(7, 3),
    )  # fmt: skip


CASES = {
    "mlp": (mlp_inplace, (5,), ["input", "0", "2"]),
    "conv": (ConvNet, (2, 9), ["input", "0", "2", "4"]),
    "residual": (Residual, (2, 5, 5), ["input", "stem", "norm"]),
    "transformer": (Block, (4, 3), ["input", "embed", "layer"]),
    "transformer, several outputs": (lambda: Block(3), (4, 3), ["input", "embed"]),
    "many outputs": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 19)), (5,),
                     ["input", "0"]),
}  # fmt: skip


def jacobian_norms(model: nn.Module, x: Tensor, feature: str, norm: float) -> Tensor:
    """Per row, the Jacobian of the rest of the model at the feature, by brute force."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    parameters |= {name: b.detach() for name, b in model.named_buffers()}

    def head(v: Tensor, row: Tensor) -> Tensor:
        if feature == "input":
            return functional_call(model, parameters, (v[None],))[0].reshape(-1)
        module = model.get_submodule(feature)
        handle = module.register_forward_hook(lambda *_: v[None].clone())
        try:
            return functional_call(model, parameters, (row[None],))[0].reshape(-1)
        finally:
            handle.remove()

    with torch.no_grad():
        feature_values = x
        if feature != "input":
            caught = []
            handle = model.get_submodule(feature).register_forward_hook(
                lambda module, args, out: caught.append(out.clone())
            )
            model(x)
            handle.remove()
            feature_values = caught[0]
    rows = [jacrev(head)(v, row).flatten(1) for v, row in zip(feature_values, x, strict=True)]
    return torch.linalg.vector_norm(torch.stack(rows), ord=norm, dim=2)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_agree_with_the_jacobian(case: str, norm: float, dtype: torch.dtype) -> None:
    make, shape, features = CASES[case]
    model = make().eval().to(dtype)
    x = torch.randn(6, *shape, dtype=dtype)
    prediction, norms = ffcp.gradient_norms(model, x, features, norm=norm)
    torch.testing.assert_close(prediction, model(x).detach())
    for feature in features:
        expected = jacobian_norms(model, x, feature, norm).view_as(prediction)
        assert expected.min() > 0
        torch.testing.assert_close(norms[feature], expected)


class Unbatchable(torch.autograd.Function):
    """An identity whose backward pass cannot run under vmap."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.from_numpy(gradient.numpy().copy())


def test_operations_that_cannot_be_batched_are_taken_one_by_one() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(Unbatchable.apply(torch.tanh(self.first(x))))

    model, x = Wrapped(), torch.randn(6, 4)
    plain = nn.Sequential(model.first, nn.Tanh(), model.second)
    _, norms = ffcp.gradient_norms(model, x, ["first"])
    torch.testing.assert_close(norms["first"], ffcp.gradient_norms(plain, x, ["0"])[1]["0"])


def test_no_word_of_torch_about_batching_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ffcp.gradient_norms(Block(2), torch.randn(5, 4, 3), ["embed"])


def test_all_layers_at_once_equal_each_alone(mlp: nn.Sequential) -> None:
    x = torch.randn(10, 4)
    _, together = ffcp.gradient_norms(mlp, x, ["input", "0", "1", "3", "output"])
    for name, norms in together.items():
        _, alone = ffcp.gradient_norms(mlp, x, [name])
        torch.testing.assert_close(norms, alone[name])
    assert (together["output"] == 1).all()


def test_features_may_be_given_as_modules(mlp: nn.Sequential) -> None:
    x = torch.randn(3, 4)
    _, norms = ffcp.gradient_norms(mlp, x, [mlp[3], "3"])
    assert torch.equal(norms[mlp[3]], norms["3"])


def test_batch_size_does_not_change_the_norms(mlp: nn.Sequential) -> None:
    x = torch.randn(23, 4)
    whole = ffcp.gradient_norms(mlp, x, ["0"], batch_size=23)
    cut = ffcp.gradient_norms(mlp, x, ["0"], batch_size=5)
    torch.testing.assert_close(whole[0], cut[0])
    torch.testing.assert_close(whole[1]["0"], cut[1]["0"])


def test_half_precision_norms_do_not_overflow() -> None:
    model = nn.Linear(300, 1).to(torch.bfloat16)
    nn.init.constant_(model.weight, 3e3)
    _, norms = ffcp.gradient_norms(model, torch.randn(2, 300, dtype=torch.bfloat16), ["input"])
    assert torch.isfinite(norms["input"]).all()


# -- what the model is given and what it returns ----------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Embedding(5, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return torch.tanh(self.a(x) + self.b(kind)).sum(dim=1)


class OneDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoInputs()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["x"], batch["kind"])


def test_tuples_and_dicts_reach_the_model_as_it_takes_them() -> None:
    model = TwoInputs()
    x, kind = torch.randn(7, 2), torch.randint(0, 5, (7,))
    wrapped = OneDict()
    wrapped.inner = model
    expected, norms = ffcp.gradient_norms(model, (x, kind), ["a", "b", "input"])
    for given, network in [
        ({"x": x, "kind": kind}, model),
        ((x.numpy(), kind.numpy()), model),
        ({"x": x, "kind": kind}, wrapped),
    ]:
        prefix = "inner." if network is wrapped else ""
        prediction, same = ffcp.gradient_norms(network, given, [f"{prefix}a"], batch_size=3)
        torch.testing.assert_close(prediction, expected)
        torch.testing.assert_close(same[f"{prefix}a"], norms["a"])


class Squares(nn.Module):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return (x**2).sum(dim=1) + (z**2).sum(dim=1)


def test_input_means_all_tensors_and_can_name_one() -> None:
    x, z = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    _, norms = ffcp.gradient_norms(Squares(), {"x": x, "z": z}, ["input", "input[x]", "input[z]"])
    assert norms["input"].item() == pytest.approx(2 * math.sqrt(14))
    assert norms["input[x]"].item() == pytest.approx(2 * math.sqrt(5))
    assert norms["input[z]"].item() == pytest.approx(6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        sequence, _ = self.lstm(x)
        return self.head(sequence[:, -1])


def test_one_of_several_outputs_of_a_module_is_named() -> None:
    model = Recurrent()
    _, norms = ffcp.gradient_norms(model, torch.randn(3, 5, 2), ["lstm[0]"])
    expected = model.head.weight.norm().expand(3, 1)
    torch.testing.assert_close(norms["lstm[0]"], expected.detach())
    with pytest.raises(ValueError, match=r"lstm\[1\]\[1\]"):
        ffcp.gradient_norms(model, torch.randn(3, 5, 2), ["lstm"])
    with pytest.raises(ValueError, match=r"\(1, 3, 4\)"):
        ffcp.gradient_norms(model, torch.randn(3, 5, 2), ["lstm[1][0]"])


class NamedLikeReserved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.input(x)))


def test_modules_called_input_and_output_can_be_reached() -> None:
    model, x = NamedLikeReserved(), torch.randn(4, 2)
    _, norms = ffcp.gradient_norms(model, x, ["input", model.input, ".input"])
    assert torch.equal(norms[model.input], norms[".input"])
    assert not torch.allclose(norms["input"], norms[".input"])


# -- no trace ----------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Remembers under which conditions each part ran."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.drop = nn.Dropout(0.5)
        self.graphs = Record()
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        v = self.trunk(x)
        self.graphs.append(v.requires_grad)
        v = self.drop(torch.tanh(v))
        self.graphs.append(v.requires_grad)
        if self.fail:
            raise RuntimeError("broken on purpose")
        return self.head(v)


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_it_was_also_after_an_exception(fail: bool) -> None:
    model = Recorder()
    model.train()
    model.drop.eval()
    model.trunk.bias.requires_grad_(False)
    model.fail = fail
    user_hook = model.trunk.register_forward_hook(lambda *_: None)
    modes = [module.training for module in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    state = torch.get_rng_state()
    x = torch.randn(4, 3)
    state = torch.get_rng_state()
    if fail:
        with pytest.raises(RuntimeError, match="broken on purpose"):
            ffcp.gradient_norms(model, x, ["drop"])
    else:
        ffcp.gradient_norms(model, x, ["drop"])
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert list(model.trunk._forward_hooks) == [user_hook.id]
    assert not model.drop._forward_hooks
    assert not x.requires_grad


def test_the_part_before_the_feature_runs_without_a_graph() -> None:
    model = Recorder()
    ffcp.gradient_norms(model, torch.randn(4, 3), ["drop"])
    assert model.graphs == [False, True]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_norms_work_under_the_callers_no_grad(context, mlp: nn.Sequential) -> None:
    model = nn.Sequential(nn.Tanh(), mlp)  # saves its input for the backward pass
    x = torch.randn(5, 4)
    _, expected = ffcp.gradient_norms(model, x, ["input", "1.0"])
    with context():
        _, inside = ffcp.gradient_norms(model, x.clone().mul_(1), ["input", "1.0"])
    torch.testing.assert_close(inside, expected)


def test_activation_checkpointing_may_replay_the_feature() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
            self.head = nn.Linear(5, 1)

        def block(self, v: Tensor) -> Tensor:
            return torch.tanh(self.second(torch.tanh(v)))

        def forward(self, x: Tensor) -> Tensor:
            v = self.first(x)
            return self.head(checkpoint(self.block, v, use_reentrant=False))

    model, x = Checkpointed(), torch.randn(6, 4)
    plain = nn.Sequential(model.first, nn.Tanh(), model.second, nn.Tanh(), model.head)
    _, norms = ffcp.gradient_norms(model, x, ["first", "second"])
    _, expected = ffcp.gradient_norms(plain, x, ["0", "2"])
    torch.testing.assert_close(norms["first"], expected["0"])
    torch.testing.assert_close(norms["second"], expected["2"])


def test_user_input_is_not_changed_by_an_in_place_head() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))
    x = torch.randn(3, 2)
    before = x.clone()
    ffcp.gradient_norms(model, x, ["input", "0", "1"])
    assert torch.equal(x, before)
    assert not x.requires_grad


def test_gradient_of_vmap_reference_is_not_trivial() -> None:
    # Guards the reference itself: a linear head has the norm of its weights everywhere.
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    jacobian = vmap(jacrev(lambda v: model(v)))(torch.randn(4, 3))
    reference = jacobian_norms(model, torch.randn(4, 3), "0", 2)
    torch.testing.assert_close(reference, jacobian.norm(dim=2))
