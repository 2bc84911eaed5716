"""FCP's score: how far the feature must move until the head gives the target.

``descend`` follows the paper: gradient descent on (g(v) - y)^2, stopped after a number of steps,
whether or not g(v) = y by then. ``exact_distance`` goes on until y lies between the head's values
at two features, and returns the distance of the farther one; only with it do FCP's intervals have
a guarantee in the space of the targets.

Every row has its own loss and takes its own path, so other rows of a batch change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]

OPTIMIZERS = ("sgd", "adam")  # both treat every number on its own, as rows require
_NEWTON_STEPS = 100  # before a row is given up
_HALVINGS = 20  # to 1e-6; the guarantee does not depend on it


def _updater(moving: Tensor, optimizer: str, lr: float) -> Callable[[Tensor], object]:
    """Return the function that moves the features along a gradient."""
    if optimizer == "sgd":  # by hand: torch's own takes as long as a small layer
        return lambda gradient: moving.data.sub_(gradient, alpha=lr)
    adam = torch.optim.Adam([moving], lr=lr)

    def step(gradient: Tensor) -> None:
        moving.grad = gradient
        adam.step()

    return step


def row_distance(a: Tensor, b: Tensor, norm: float) -> Tensor:
    """Return the distance of corresponding rows in the L-infinity or L2 norm.

    >>> row_distance(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), 2)
    tensor([5.])
    """
    distance: Tensor = torch.linalg.vector_norm((a - b).reshape(len(a), -1), norm, dim=1)
    return distance


def descend(
    head: Head,
    v: Tensor,
    y: Tensor,
    steps: Sequence[int],
    *,
    lr: float,
    norm: float = math.inf,
    optimizer: str = "sgd",
) -> Tensor:
    """Return the distance from ``v`` after each of the given numbers of descent steps.

    All are taken from one trajectory.

    Parameters
    ----------
    head : Head
        Maps features (n, ...) to one output per row, (n,), or to several, (n, m).
    v, y : Tensor
        Features and targets of n rows; several outputs are inverted together. NaN is an unknown
        target.
    steps : sequence of int
        Numbers of steps, in increasing order.
    lr : float
    optimizer : str, default="sgd"
        Step size, and ``"sgd"`` or ``"adam"``.
    norm : float, default=math.inf
        ``inf`` or 2.

    Returns
    -------
    Tensor
        Shape (len(steps), n).

    Examples
    --------
    >>> head = torch.nn.Flatten(0)
    >>> v, y = torch.zeros(1, 1), torch.ones(1)
    >>> descend(head, v, y, [1, 200], lr=0.1)
    tensor([[0.2000],
            [1.0000]])
    """
    with torch.inference_mode(False), torch.enable_grad():
        moving = v.detach().clone().requires_grad_()
        update = _updater(moving, optimizer, lr)
        distances, done = [], 0
        for count in steps:
            for _ in range(count - done):
                # A sum: each row has its own loss. An unknown target adds nothing.
                loss = (head(moving) - y).masked_fill(y.isnan(), 0.0).square().sum()
                update(torch.autograd.grad(loss, moving)[0])
            done = max(done, count)
            distances.append(row_distance(moving.detach(), v, norm))
    return torch.stack(distances)


def exact_distance(
    head: Head,
    v: Tensor,
    y: Tensor,
    *,
    norm: float = math.inf,
) -> Tensor:
    """Return a distance within which the head certainly takes the value ``y``.

    Newton steps along the steepest direction of the norm run until the head has passed y; then
    bisection along the line back to ``v`` locates the crossing to 1e-6 of its length. y lies
    between the head's values at two features no farther than the distance returned, so the range
    of the head over that ball contains y. Infinite where the steps never passed y.

    Parameters
    ----------
    head : Head
        As in :func:`descend`.
    v, y : Tensor
        As in :func:`descend`.
    norm : float, default=math.inf
        As in :func:`descend`.

    Examples
    --------
    >>> exact_distance(lambda v: v.sum(dim=1), torch.zeros(1, 2), torch.ones(1), norm=math.inf)
    tensor([0.5000])
    """
    far, has_passed = _pass_target(head, v, y, norm)
    distances = row_distance(_halve(head, v, far, y), v, norm)
    return torch.where(has_passed, distances, math.inf).masked_fill(head(v).detach() == y, 0.0)


def _pass_target(head: Head, v: Tensor, y: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """Move each row until the head's value has passed y; return also which rows succeeded."""
    with torch.inference_mode(False), torch.enable_grad():
        moving = v.detach().clone()
        side = None
        has_passed = torch.zeros(len(v), dtype=torch.bool, device=v.device)
        for _ in range(_NEWTON_STEPS):
            moving.requires_grad_()
            value = head(moving)
            gap = (y - value).detach()
            side = gap.sign() if side is None else side
            has_passed |= gap * side <= 0
            if bool(has_passed.all()):
                break
            (gradient,) = torch.autograd.grad(value.sum(), moving)
            step = _newton_step(gradient, gap, norm)
            # A little too far on purpose: a row that arrives exactly has not passed.
            moving = torch.where(like(has_passed, v), moving, moving + 1.01 * step).detach()
    return moving.detach(), has_passed


def _newton_step(gradient: Tensor, gap: Tensor, norm: float) -> Tensor:
    """Return the shortest step in the norm that closes the gap if the head is linear."""
    rows = gradient.reshape(len(gradient), -1)
    if norm == 2:
        direction, slope = rows, rows.square().sum(dim=1)
    else:
        direction, slope = rows.sign(), rows.abs().sum(dim=1)
    length = torch.where(slope > 0, gap / slope, 0.0).nan_to_num(0.0, 0.0, 0.0)
    return (direction * length[:, None]).view_as(gradient)


def _halve(head: Head, v: Tensor, far: Tensor, y: Tensor) -> Tensor:
    """Bisect between ``v`` and ``far`` for the point where the head's value passes y."""
    side = (y - head(v).detach()).sign()
    low, high = torch.zeros_like(y), torch.ones_like(y)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        with torch.no_grad():
            value = head(torch.lerp(v, far, like(middle, v)))
        passed = (y - value) * side <= 0
        low, high = torch.where(passed, low, middle), torch.where(passed, middle, high)
    return torch.lerp(v, far, like(high, v))


def like(rows: Tensor, v: Tensor) -> Tensor:
    """Shape one number per row so that it multiplies features."""
    return rows.reshape(-1, *[1] * (v.dim() - 1))
