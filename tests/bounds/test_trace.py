"""What is read off a graph, what is left as it was, and what is refused."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.bounds import Bounds, crown, ibp, trace
from tests.bounds.heads import METHODS, NORMS, build


class Cancel(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        y = self.one(x)
        return y + (-1) * y + 0.1 * x


@NORMS
def test_crown_sees_branches_cancel(norm):
    center = torch.randn(3, 4)
    lower, upper = crown(Cancel(), center, 1.0, norm)
    torch.testing.assert_close(lower, 0.1 * (center - 1))
    torch.testing.assert_close(upper, 0.1 * (center + 1))


def test_crown_sees_a_residual_branch_cancel_through_stable_relus():
    class Minus(nn.Module):
        def forward(self, x):
            return torch.relu(x + 5) - x

    lower, upper = crown(Minus(), torch.zeros(1, 2), 1.0)
    torch.testing.assert_close(lower, torch.full((1, 2), 5.0))
    torch.testing.assert_close(upper, torch.full((1, 2), 5.0))
    assert ibp(Minus(), torch.zeros(1, 2), 1.0).upper.max() == 7


def test_crown_sees_the_input_cancel_its_own_activation():
    class Minus(nn.Module):
        def forward(self, x):
            return torch.relu(x) - x

    for end in crown(Minus(), torch.full((1, 2), 5.0), 1.0):
        torch.testing.assert_close(end, torch.zeros(1, 2))


def test_crown_bounds_hidden_units_by_crown_too():
    # The hidden unit is x - x + 1 = 1; as an interval, [-1, 3], whose relaxed ReLU reaches 1.5.
    head = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        head[0].weight.fill_(1.0)
        head[0].bias.zero_()
        head[1].weight.copy_(torch.tensor([[1.0, -1.0]]))
        head[1].bias.fill_(1.0)
        head[3].weight.fill_(1.0)
        head[3].bias.zero_()
    for end in crown(head, torch.zeros(1, 1), 1.0):
        assert end.item() == pytest.approx(1.0)


def test_crown_keeps_the_l2_ball_through_stable_activations():
    head, center = nn.Sequential(nn.ReLU(), nn.Linear(4, 1)), torch.full((1, 4), 5.0)
    exact = ibp(head[1], center, 1.0, 2)
    torch.testing.assert_close(tuple(crown(head, center, 1.0, 2)), tuple(exact))
    assert ibp(head, center, 1.0, 2).upper > exact.upper + 0.01


def test_a_layer_used_twice_is_applied_twice():
    relu, layer = nn.ReLU(), nn.Linear(3, 3)
    head, center = nn.Sequential(layer, relu, layer, relu), torch.randn(2, 3)
    torch.testing.assert_close(ibp(head, center, 0.0).lower, head(center))


def test_a_traced_head_reads_new_weights():
    head, center = build("relu")
    traced = trace(head)
    before = crown(traced, center, 0.5)
    with torch.no_grad():
        head[0].weight.mul_(2)
    assert not torch.equal(crown(traced, center, 0.5).lower, before.lower)
    torch.testing.assert_close(tuple(crown(traced, center, 0.5)), tuple(crown(head, center, 0.5)))


def test_a_parametrized_layer_counts_as_the_layer_it_is():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    center = torch.randn(2, 3)
    torch.testing.assert_close(ibp(layer, center, 0.0).upper, layer(center))


@METHODS
def test_modes_gradients_and_parameters_are_left_alone(bound):
    head, center = build("batch norm 1d")
    head.train()
    head[2].eval()
    before = {k: v.clone() for k, v in head.state_dict().items()}
    center.requires_grad_()
    box = bound(head, center, 0.5)
    assert not box.lower.requires_grad
    assert [m.training for m in head] == [True, True, False, True, True]
    assert all(p.requires_grad and p.grad is None for p in head.parameters())
    assert all(torch.equal(before[k], v) for k, v in head.state_dict().items())
    assert torch.equal(box.lower, bound(head.eval(), center, 0.5).lower)


@METHODS
def test_training_only_branches_are_read_in_eval_mode_and_the_mode_restored(bound):
    head, center = build("functions")
    expected = bound(head, center, 0.5)
    head.train()
    assert torch.equal(bound(head, center, 0.5).lower, expected.lower)
    assert head.training
    assert head.one.training


def test_an_unsupported_layer_is_named_with_a_remedy():
    head = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.LayerNorm(3)), nn.Softmax(1))
    with pytest.raises(TypeError, match=r"layer '1\.1' \(LayerNorm\)") as error:
        ibp(head, torch.zeros(1, 3), 1.0)
    assert "layer '2' (Softmax)" in str(error.value)
    assert "Use one of Linear" in str(error.value)
    assert "cut the network at a later layer" in str(error.value)


def test_a_subclass_with_its_own_forward_is_not_taken_for_its_parent():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.bias

    with pytest.raises(TypeError, match=r"'0\.weight' \(weight in Shifted\)"):
        trace(nn.Sequential(Shifted(2, 2)))


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.relu = nn.ReLU(inplace=True)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda self, x: x * x, "'mul'.*product with a number"),
        (lambda self, x: x.cumsum(1), "'cumsum'"),
        (lambda self, x: x + self.layer.bias, "'layer_bias'.*outside a layer"),
        (lambda self, x: self.layer(input=x), r"layer 'layer' \(Linear\).*called with"),
        (lambda self, x: torch.add(x, x, alpha=2), "'add'.*alpha"),
        (lambda self, x: x.flatten(), "start_dim=0"),
        (lambda self, x: functional.dropout(x), "at random"),
        (lambda self, x: (x, x), "tensor"),
        (lambda self, x: x if x.sum() > 0 else -x, "torch.fx"),
        (lambda self, x: self.relu(x) + x, "'relu'.*overwrites 'input'.*inplace=False"),
    ],
)
def test_a_call_that_cannot_be_bounded_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        trace(Calls(call))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect"), "padding_mode='reflect'"),
        (nn.AvgPool1d(3, ceil_mode=True), "ceil_mode"),
        (nn.AvgPool2d(3, divisor_override=2), "divisor_override"),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), "count_include_pad"),
        (nn.BatchNorm1d(2, track_running_stats=False), "BatchNorm1d"),
    ],
)
def test_an_option_that_cannot_be_bounded_is_named(layer, message):
    with pytest.raises(TypeError, match=f"layer '0'.*{message}"):
        trace(nn.Sequential(layer))


def test_uneven_adaptive_pooling_quotes_both_sizes():
    with pytest.raises(ValueError, match=r"\(5,\) to \(2,\)"):
        ibp(nn.AdaptiveAvgPool1d(2), torch.zeros(1, 3, 5), 1.0)


def test_a_broadcast_sum_quotes_both_shapes():
    head = Calls(lambda self, x: self.layer(x) + x.flatten(1))
    with pytest.raises(ValueError, match=r"'add'.*\(2, 2\) and \(4,\)"):
        ibp(head, torch.zeros(1, 2, 2), 1.0)


@METHODS
@pytest.mark.parametrize(
    ("radius", "message"),
    [
        (-0.5, r"-0\.5"),
        (math.nan, "nan"),
        (torch.tensor([1.0, -2.0, 0.0]), r"-2\.0.*row 1"),
        (torch.tensor([1.0, 2.0, math.nan]), "nan.*row 2"),
        (torch.ones(2), r"radius.*\(2,\)"),
        (torch.ones(3, 1), r"radius.*\(3, 1\)"),
    ],
)
def test_a_bad_radius_is_quoted(bound, radius, message):
    with pytest.raises(ValueError, match=message):
        bound(nn.Linear(5, 1), torch.zeros(3, 5), radius)


@METHODS
def test_a_bad_center_or_norm_is_quoted(bound):
    center = torch.zeros(3, 5)
    with pytest.raises(ValueError, match="norm"):
        bound(nn.Linear(5, 1), center, 1.0, 1)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        bound(nn.Linear(5, 1), center.long(), 1.0)
    center[2, 1] = math.nan
    with pytest.raises(ValueError, match="row 2"):
        bound(nn.Linear(5, 1), center, 1.0)


def test_bounds_unpack_as_lower_and_upper():
    lower, upper = box = ibp(nn.Identity(), torch.zeros(1, 1), 1.0)
    assert isinstance(box, Bounds)
    assert (lower.item(), upper.item()) == (-1, 1)


class Halved(nn.Module):
    """A module that says itself how it maps bounds."""

    def forward(self, x: Tensor) -> Tensor:
        return -x / 2

    def bounds(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        return -upper / 2, -lower / 2


def test_a_module_can_bound_itself_for_ibp_alone() -> None:
    head = nn.Sequential(Halved(), nn.ReLU())
    found = ibp(head, torch.tensor([[-3.0, 1.0]]), 1.0)
    assert found.lower.tolist() == [[1.0, 0.0]]
    assert found.upper.tolist() == [[2.0, 0.0]]
    with pytest.raises(ValueError, match="'0'"):
        crown(head, torch.zeros(1, 2), 1.0)
