"""Heads of every supported layer, and points of the balls around their rows."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.nn import functional

from ffcp.bounds import crown, ibp

METHODS = pytest.mark.parametrize("bound", [ibp, crown])
NORMS = pytest.mark.parametrize("norm", [math.inf, 2])
fixed = settings(derandomize=True, deadline=None, max_examples=25, database=None)


class Residual(nn.Module):
    """relu(x + body(x)), the addition in a graph that only tracing sees."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Functions(nn.Module):
    """Functions, methods, numbers and repeated use of the input in one forward."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)

    def forward(self, x):
        y = functional.leaky_relu(self.one(x), 0.2) + x
        y = functional.dropout(y, 0.5, self.training)
        z = torch.tanh(2 * y - 1) - functional.gelu(self.two(y)).sigmoid()
        return torch.flatten(1 - torch.add(z, -x), 1)


class Block(nn.Module):
    """A residual block with convolutions, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = random_batch_norm(nn.BatchNorm2d(4))
        self.relu = nn.ReLU(inplace=True)
        self.two = nn.Conv2d(4, 4, 3, padding="same", groups=2)

    def forward(self, x):
        y = self.two(self.relu(self.norm(self.one(x))))
        y += x
        return self.relu(y)


def random_batch_norm(layer):
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    if layer.affine:
        nn.init.normal_(layer.weight)  # of both signs
        nn.init.normal_(layer.bias)
    return layer


def mlp(*widths, activation=nn.ReLU):
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


# Every supported layer occurs here: name -> (row shape, builder).
HEADS = {
    "identity": ((5,), nn.Identity),
    "linear": ((5,), lambda: nn.Linear(5, 3)),
    "linear without bias on sequences": ((3, 5), lambda: nn.Linear(5, 2, bias=False)),
    "relu first": ((6,), lambda: nn.Sequential(nn.ReLU(), mlp(6, 8, 1))),
    "relu": ((6,), lambda: mlp(6, 9, 8, 7, 3)),
    "leaky relu": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.LeakyReLU)),
    "leaky relu falling": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.LeakyReLU, -0.5))),
    "leaky relu steep": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.LeakyReLU, 1.7))),
    "leaky relu zero": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.LeakyReLU, 0.0))),
    "tanh": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.Tanh)),
    "sigmoid": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.Sigmoid)),
    "gelu": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.GELU)),
    "gelu tanh": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.GELU, approximate="tanh"))),
    "silu": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.SiLU)),
    "activations in a row": ((6,), lambda: nn.Sequential(nn.SiLU(), nn.Tanh(), nn.Linear(6, 2))),
    "dropout": (
        (6,),
        lambda: nn.Sequential(nn.Dropout(0.9), nn.AlphaDropout(0.5), mlp(6, 5, 2), nn.Dropout(0.9)),
    ),
    "batch norm 1d": (
        (6,),
        lambda: nn.Sequential(
            random_batch_norm(nn.BatchNorm1d(6)),
            nn.Linear(6, 7),
            random_batch_norm(nn.BatchNorm1d(7, affine=False)),
            nn.ReLU(),
            nn.Linear(7, 2),
        ),
    ),
    "conv 1d": (
        (2, 9),
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, padding=1),
            random_batch_norm(nn.BatchNorm1d(4)),
            nn.ReLU(),
            nn.Dropout1d(),
            nn.Conv1d(4, 4, 2, padding="same", dilation=3, groups=2),
            nn.Tanh(),
            nn.AvgPool1d(3, stride=1, padding=1),
            nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten()),
            nn.Linear(4, 2),
        ),
    ),
    "conv 2d": (
        (2, 7, 6),
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(1, 2)),
            nn.ReLU(),
            nn.Dropout2d(),
            nn.AvgPool2d(2),
            nn.Conv2d(4, 2, 1, padding="valid"),
            nn.Flatten(2),
            nn.GELU(),
            nn.Flatten(),
            nn.LazyLinear(2),
        ),
    ),
    "pool first": ((2, 4, 6), lambda: nn.Sequential(nn.AdaptiveAvgPool2d((2, None)), nn.Flatten())),
    "residual": ((6,), lambda: nn.Sequential(Residual(mlp(6, 8, 6)), Residual(nn.Linear(6, 6)))),
    "functions": ((6,), Functions),
    "block": ((4, 3, 3), lambda: nn.Sequential(Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
}
EVERY_HEAD = pytest.mark.parametrize("name", HEADS)


@torch.no_grad()
def build(name, rows=3, seed=0):
    torch.manual_seed(seed)
    shape, make = HEADS[name]
    head, center = make().eval(), torch.randn(rows, *shape)
    head(center)  # gives lazy layers their shape
    return head, center


def sample(center, radius, norm, points):
    """Points of each row's ball, many of them on its boundary: (points, n, ...)."""
    step = torch.randn(points, *center.shape)
    flat = step.flatten(2)
    if norm == 2:
        flat = flat / flat.norm(dim=-1, keepdim=True)
        flat[::2] *= torch.rand(len(flat[::2]), flat.shape[1], 1)
    else:
        flat = torch.where(torch.arange(points)[:, None, None] % 2 == 0, flat.sign(), flat.tanh())
    return center + flat.view_as(step) * radius.view(-1, *[1] * (center.ndim - 1))


def assert_inside(values, box, tolerance=1e-9):
    assert (values >= box.lower - tolerance).all()
    assert (values <= box.upper + tolerance).all()
