"""One pass over a batch brings the output, the norms and the values."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.batch import Requires
from ffcp.network.forward import check_rows, run_batch, run_batches
from ffcp.scales import Sketch, Smooth
from tests.conftest import normal, small_mlp
from tests.network.record import Record


class Counted(nn.Module):
    """Counts its runs; works in place behind the feature."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, outputs)
        self.act, self.runs = nn.ReLU(inplace=True), Record()

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(len(x))
        return self.second(self.act(self.first(x)))


X = normal(6, 3, seed=1)


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("norms", [(), ("first",), ("input", "first", "output")])
def test_one_run_of_the_model_brings_everything(outputs: int, norms: tuple[str, ...]) -> None:
    model = Counted(outputs).eval()
    seen = run_batch(model, X, Requires(norms, ("first", "act", "input", "output")), first_row=10)
    assert model.runs == [6]
    v = model.first(X).detach()
    torch.testing.assert_close(seen.values["first"], v)  # though the next layer works in place
    torch.testing.assert_close(seen.values["act"], v.relu())
    assert seen.values["input"] is X or seen.values["input"].equal(X)
    assert seen.values["output"].equal(seen.output)
    torch.testing.assert_close(seen.output, model(X).detach())
    _, expected = ffcp.gradient_norms(model, X, norms)
    assert set(seen.norms) == set(norms)
    for name in norms:
        torch.testing.assert_close(seen.norms[name], expected[name])
    tensors = [seen.output, *seen.norms.values(), *seen.values.values()]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert seen.rows == range(10, 16)


@pytest.mark.parametrize("method", [Sketch(3), Smooth(0.5, 2)], ids=str)
def test_values_are_those_of_the_plain_pass_whatever_the_method(method) -> None:
    model = Counted(4).eval()
    seen = run_batch(model, X, Requires(("first",), ("first",), method=method))
    torch.testing.assert_close(seen.values["first"], model.first(X).detach())
    torch.testing.assert_close(seen.output, model(X).detach())
    assert seen.norms["first"].equal(
        ffcp.gradient_norms(model, X, ["first"], method=method)[1]["first"]
    )


def test_groups_are_handed_on() -> None:
    groups = ["a"] * 6
    assert run_batch(Counted(), X, groups=groups).groups is groups


# -- a number made of the output ---------------------------------------------------------------


def top(logits: Tensor) -> Tensor:
    return logits.double().softmax(dim=1).amax(dim=1)


def test_the_norm_of_a_number_made_of_the_output() -> None:
    model = Counted(4).eval()
    seen = run_batch(model, X, Requires(("first", "input", "output"), of=top))
    for name, head, at in (
        ("input", lambda v: model.second(model.first(v).relu()), X),
        ("first", lambda v: model.second(v.relu()), model.first(X).detach()),
    ):
        v = at.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(top(head(v)).sum(), v)
        torch.testing.assert_close(seen.norms[name], gradient.double().norm(dim=1))
    assert seen.norms["output"].equal(torch.ones(6, dtype=torch.float64))
    assert seen.output.shape == (6, 4)


def test_a_number_made_of_the_output_can_be_smoothed_but_not_sketched() -> None:
    model, requires = Counted(4), Requires(("first",), of=top)
    many = run_batch(model, X, requires._replace(method=Smooth(1e-4, 2)))
    torch.testing.assert_close(
        many.norms["first"], run_batch(model, X, requires).norms["first"], rtol=1e-2, atol=0
    )
    with pytest.raises(ValueError, match="sketch"):
        run_batch(model, X, requires._replace(method=Sketch(2)))


def test_the_norm_of_two_tensors_of_an_input_is_one_norm() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return 3 * a.sum(dim=1, keepdim=True) + 4 * b[:, None]

    x = (torch.ones(2, 1), torch.ones(2))
    for norm, expected in ((2, 5.0), (1, 7.0), (math.inf, 4.0)):
        seen = run_batch(Two(), x, Requires(("input",), norm=norm, of=lambda output: output[:, 0]))
        assert seen.norms["input"].tolist() == [expected] * 2


# -- values ------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embed = nn.Linear(2, 3), nn.Embedding(5, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return (self.linear(x) + self.embed(kind)).sum(dim=1)


def test_the_tensors_of_an_input_lie_side_by_side() -> None:
    x, kind = normal(4, 2, seed=1).double(), torch.tensor([0, 4, 2, 2])
    model = TwoInputs().double()
    seen = run_batch(model, (x, kind), Requires(("input",), ("input", "input[0]", "input[1]")))
    together = seen.values["input"]
    assert together.dtype == torch.float32
    assert together.equal(torch.cat([x.float(), kind[:, None].float()], dim=1))
    assert seen.values["input[0]"].equal(x)
    assert seen.values["input[1]"].equal(kind)


def test_localized_prediction_takes_an_input_of_two_tensors() -> None:
    x, kind, y = normal(60, 2, seed=1), torch.arange(60) % 5, normal(60, seed=2)
    predictor = ffcp.LCP(TwoInputs()).calibrate((x, kind), y)
    assert predictor.predict_interval((x[:7], kind[:7])).lower.shape == (7,)


def test_a_value_may_be_one_of_several_tensors() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    model, x = Recurrent(), normal(3, 5, 2, seed=1)
    assert run_batch(model, x, Requires(values=("lstm[0]",))).values["lstm[0]"].shape == (3, 5, 4)
    with pytest.raises(ValueError, match=r"'lstm'.*lstm\[0\]"):
        run_batch(model, x, Requires(values=("lstm",)))
    with pytest.raises(ValueError, match=r"\(1, 3, 4\)"):
        run_batch(model, x, Requires(values=("lstm[1][0]",)))


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.stopped = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = self.stopped(x)
        return self.twice(self.twice(x)) + v


@pytest.mark.parametrize(("name", "message"), [
    ("twice", "'twice'"),
    ("never", "'never'"),
    ("other", "'other'"),
])  # fmt: skip
def test_a_layer_without_one_value_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_batch(Awkward(), X, Requires(values=(name,)))


def test_a_value_needs_no_gradient() -> None:
    model = Awkward()
    seen = run_batch(model, X, Requires(values=("stopped",)))
    torch.testing.assert_close(seen.values["stopped"], model.stopped(X).detach())
    with pytest.raises(ValueError, match=r"stopped"):
        run_batch(model, X, Requires(("stopped",), ("stopped",)))


# -- rows and batches --------------------------------------------------------------------------


class NeverZero(nn.Module):
    """NaN where the input is zero; its gradient is infinite where it is one."""

    def forward(self, x: Tensor) -> Tensor:
        return (1 - x).sqrt() + 0 * (x / x)


@pytest.mark.parametrize("of", [None, lambda output: output[:, 0]])
@pytest.mark.parametrize(("bad", "message"), [
    (math.nan, "x .*nan.*row 12"),
    (math.inf, "x .*inf.*row 12"),
    (0.0, "prediction.*row 12"),
    (1.0, "'input'.*row 12"),
])  # fmt: skip
def test_the_first_bad_row_is_named(bad: float, message: str, of) -> None:
    x = torch.full((5, 1), 0.5)
    x[2] = bad
    with pytest.raises(ValueError, match=message):
        run_batch(NeverZero(), x, Requires(("input",), of=of), first_row=10)


def test_no_rows_are_refused() -> None:
    for passes in (run_batch, lambda *args: next(run_batches(*args))):
        with pytest.raises(ValueError, match="rows"):
            passes(Counted(), torch.empty(0, 3))


def test_batches_follow_each_other_and_leave_the_model_alone() -> None:
    model = Counted()
    model.train()
    rows, state = [], torch.get_rng_state()
    with torch.no_grad():
        for seen in run_batches(
            model, X, Requires(("first",), ("act",)), batch_size=4, first_row=3
        ):
            rows.append(seen.rows)
            assert model.training
            assert not torch.is_grad_enabled()
            assert all(parameter.requires_grad for parameter in model.parameters())
            assert not model.first._forward_hooks
            assert torch.get_rng_state().equal(state)
            assert len(seen.x) == len(seen.output) == len(seen.values["act"]) == len(seen.rows)
    assert rows == [range(3, 7), range(7, 9)]


@pytest.mark.long
@pytest.mark.parametrize("outputs", [1, 3])
def test_no_graph_outlives_its_pass(outputs: int) -> None:
    class Watched(Counted):
        def forward(self, x: Tensor) -> Tensor:
            v = torch.tanh(self.first(x))  # tanh keeps its output for the backward pass
            self.runs.append(weakref.ref(v))
            return self.second(v)

    model = Watched(outputs)
    parts = run_batches(model, X, Requires(("first",), ("first",)), batch_size=2)
    kept = next(parts)
    gc.collect()
    assert model.runs[-1]() is None
    assert kept.values["first"].shape == (2, 5)


def test_an_error_in_a_later_batch_names_the_row() -> None:
    x = X.clone()
    x[5, 1] = math.nan
    parts = run_batches(Counted(), x, batch_size=2, first_row=100)
    assert [next(parts).rows.start, next(parts).rows.start] == [100, 102]
    with pytest.raises(ValueError, match="row 105"):
        next(parts)


def test_batches_together_are_the_whole() -> None:
    model = small_mlp(outputs=3)
    x = normal(23, 4, seed=1)
    prediction, norms = ffcp.gradient_norms(model, x, ["0", "output"], batch_size=5)
    seen = run_batch(model, x, Requires(("0", "output")))
    torch.testing.assert_close(prediction, seen.output)
    torch.testing.assert_close(norms, dict(seen.norms))


def test_a_model_that_treats_rows_separately_passes_the_check() -> None:
    check_rows(small_mlp(), normal(9, 4, seed=1), ["0", "output"])
    check_rows(small_mlp(), normal(1, 4, seed=1), [])
