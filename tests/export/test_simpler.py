"""What is left out of a graph changes nothing that it gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ffcp.export import graph
from ffcp.network import jacobian
from ffcp.network.features import Cut
from ffcp.network.twin import twin_of
from ffcp.pieces import Needs
from tests.export import models


def norms_of(model: nn.Module, name: str, norm: float) -> Any:
    """Give a function of rows: the prediction, and the gradient norms at a feature."""
    twin = twin_of(model)
    assert twin is not None

    def function(x: Tensor) -> list[Tensor]:
        with Cut(twin, [name]) as cut:
            tap = cut(x)
            norms = jacobian.take_norms(twin, x, tap, [name], Needs((name,), norm=norm))
        return [tap.prediction.detach(), norms[name]]

    return function


def traced(function: Any, x: Tensor, monkeypatch: Any = None) -> fx.GraphModule:
    if monkeypatch is not None:
        monkeypatch.setattr(graph, "simplify", lambda module: module.graph.eliminate_dead_code())
    return graph._traced(function, {"x": x}, ())


def operations(module: fx.GraphModule) -> Counter[str]:
    """Count the operations that cost time: not those on sizes, on constants, or that only name."""
    names = (str(n.target).split(".")[1] for n in module.graph.nodes if n.op == "call_function")
    return Counter(name for name in names if name not in ("detach", "clone", "t", "sym_size"))


class Flat(nn.Module):
    """Predicts one number, (n,), through a layer that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 8, bias=False),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat: Tensor = self.head(self.layers(x)).squeeze(-1)
        return flat


class Sum(nn.Sequential):
    """Predicts the sum of what its last layer gives."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = super().forward(x).sum(dim=1, keepdim=True)
        return total


def smooth(kind: type[nn.Module], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), kind(), nn.Linear(8, 8), kind(), nn.Linear(8, outputs))


@pytest.mark.parametrize(
    ("model", "name", "norm"),
    [
        (models.mlp(), "0", 2),
        (models.mlp(), "3", 1),
        (models.mlp(), "input", torch.inf),
        (models.mlp().double(), "0", 2),
        (models.mlp(outputs=3), "0", 1),
        (Flat(), "layers.0", 2),
        (Sum(), "0", 2),
        (smooth(nn.Tanh, 1), "0", 2),
        (smooth(nn.GELU, 2), "0", 2),
        (smooth(nn.SiLU, 1), "2", 2),
        (smooth(nn.Sigmoid, 2), "2", torch.inf),
        (smooth(lambda: nn.Threshold(0.1, 20.0), 1), "0", 2),
    ],
)
def test_a_simpler_graph_gives_what_the_longer_one_gives(model, name, norm, monkeypatch):
    dtype = next(model.parameters()).dtype
    x = torch.randn(7, 5, dtype=dtype)
    function = norms_of(model.eval(), name, norm)
    simple, long = traced(function, x), traced(function, x, monkeypatch)
    assert sum(operations(simple).values()) < sum(operations(long).values())
    for rows in (1, 2, 50):
        more = torch.randn(rows, 5, dtype=dtype)
        expected = function(more)
        for one in (simple, long):
            assert [part.shape for part in one(more)] == [part.shape for part in expected]
            torch.testing.assert_close(one(more), expected)


def test_of_the_papers_network_only_the_needed_operations_are_left():
    """One row takes as long as there are operations."""
    left = operations(traced(norms_of(models.mlp().eval(), "0", 2), torch.randn(7, 5)))
    forward = {"linear": 3, "relu": 2}
    constant = {"mul": 1}  # of a row and a matrix, both known
    back = {"gt": 1, "_to_copy": 1, "mm": 1, "threshold_backward": 1, "linalg_vector_norm": 1}
    assert left == forward | constant | back


def test_matrices_are_not_copied_for_every_output():
    """The product of a row and a matrix is another matrix in the file."""
    left = operations(traced(norms_of(models.mlp(outputs=4).eval(), "0", 2), torch.randn(7, 5)))
    assert left["mul"] == left["gt"] == 0
    assert left["threshold_backward"] == 8


class OfTheInput(nn.Module):
    """Multiplies by matrices that depend on the input, and has sums that look like norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(dim=0)
        square = torch.addmm(x[:, :1], torch.relu(self.first(x)), torch.outer(means, means).t())
        sums = torch.outer(means, means).expand(3, 5, 5).sum(1).unsqueeze(2)
        last: Tensor = self.last(torch.relu(square))
        return last + sums[:, 0].sum()


def test_what_depends_on_the_input_is_not_taken_for_a_constant():
    function, x = norms_of(OfTheInput(), "first", 2), torch.randn(7, 5)
    simple = traced(function, x)
    assert operations(simple)["gt"] == 0
    for rows in (x, torch.randn(20, 5)):
        torch.testing.assert_close(simple(rows), function(rows))
