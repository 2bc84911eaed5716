"""CROWN: bounds of a head by linear functions, propagated back from its outputs to the ball."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ffcp.bounds import balls
from ffcp.bounds.balls import Ball, box_of, by_rows, checked_ball
from ffcp.bounds.ibp import intervals, sizes_per_row
from ffcp.bounds.rules import Activation, Affine, Bounds, Lines, Own, Sum
from ffcp.bounds.trace import Head, trace


@torch.no_grad()
def crown(
    head: nn.Module | Head, center: Tensor, radius: float | Tensor, norm: float | str = math.inf
) -> Bounds:
    """Bound a head's outputs over a ball around each row by linear relaxation.

    Linear functions are pulled back from the output to the ball. Every activation is
    enclosed between two lines on the range of its input, which is bounded the same way.
    The result lies inside that of `ibp`, and is exact wherever the head is affine. For heads
    of ReLU and LeakyReLU it grows with the radius.

    Parameters
    ----------
    head : nn.Module or Head
        What to bound, taken in eval mode; see `trace` for calling it many times.
    center : Tensor
        Centers of the balls, one per row: shape (n, ...).
    radius : float or Tensor
        One radius for all rows, or a tensor of shape (n,). May be 0; a row with an infinite
        radius gets the bounds of `ibp`.
    norm : float, default=math.inf
        ``math.inf`` or 2.

    Returns
    -------
    Bounds
        ``lower`` and ``upper``, in the shape of the head's output, infinite where there is
        no bound. They hold up to the rounding of the arithmetic.

    Notes
    -----
    Time and memory grow with the number of outputs and of hidden units: each needs its own
    linear function. Rows, and units where need be, are worked on in parts of bounded size.

    Examples
    --------
    Two layers that undo each other, which intervals cannot see:

    >>> import torch
    >>> from torch import nn
    >>> from ffcp.bounds import crown, ibp
    >>> head = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    >>> head[0].weight.data = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> head[1].weight.data = torch.tensor([[1.0, -1.0]])
    >>> ibp(head, torch.zeros(1, 2), 1.0).upper, crown(head, torch.zeros(1, 2), 1.0).upper
    (tensor([[4.]]), tensor([[2.]]))
    """
    head = head if isinstance(head, Head) else trace(head)
    boxed = [node.name for node in head.nodes if isinstance(node.rule, Own)]
    if boxed:
        raise ValueError(f"layer {boxed[0]!r} bounds itself over boxes, which only ibp can use")
    ball = checked_ball(center, radius, norm)
    rows, specs = _portions(head, sizes_per_row(head, ball), ball.norm)
    return by_rows(lambda part: _crown_rows(head, part, specs), ball, rows)


def _flat(A: Tensor) -> Tensor:
    # Not flatten(2) nor reshape(..., -1): a node may have one value per row, or no rows.
    return A.reshape(*A.shape[:2], math.prod(A.shape[2:]))


def _dot(A: Tensor, x: Tensor) -> Tensor:
    """Return inner products of coefficients (n or 1, specs, ...) and values (n or 1, ...)."""
    A = _flat(A)
    x = x.reshape(len(x), A.shape[2])
    if len(A) == 1:
        return x @ A[0].T
    if len(x) == 1:
        return A @ x[0]
    return (A * x.unsqueeze(1)).sum(-1)


def _lower_bound(
    head: Head,
    ball: Ball,
    boxes: Sequence[Bounds],
    lines: Mapping[int, Lines],
    target: int,
    specs: Tensor,
) -> Tensor:
    """Return lower bounds, (n or 1, specs), of the inner products of specs with a node's value.

    Walks from the target to the input and keeps: product >= sum over pending nodes of
    A . node + constant. The A of a node that is used twice add up before it is passed, which
    is how cancellation between branches is seen. A has one row for all until a relaxed
    activation makes it depend on the row.
    """
    pending = {target: specs}
    constant = specs.new_zeros(1, specs.shape[1])

    def send(to: int, A: Tensor) -> None:
        pending[to] = pending[to] + A if to in pending else A

    for i in range(target, 0, -1):
        if i not in pending:
            continue
        A, node = pending.pop(i), head.nodes[i]
        match node.rule:
            case Sum(scales, shift):
                if shift:
                    constant = constant + shift * _flat(A).sum(-1)
                for j, scale in zip(node.inputs, scales, strict=True):
                    send(j, A if scale == 1 else A * scale)
            case Affine() as rule:
                j = node.inputs[0]
                shape = boxes[j].lower.shape[1:]
                # The image of zero is the bias, whatever the layer.
                constant = constant + _dot(A, rule.apply(A.new_zeros(1, *shape)))
                send(j, rule.pull(A.flatten(0, 1), shape).view(*A.shape[:2], *shape))
            case Activation():
                line = lines[i]
                # A positive coefficient needs the line below, a negative one the line above.
                positive, negative = A.clamp(min=0), A.clamp(max=0)
                if line.lower_shift is not None:
                    constant = constant + _dot(positive, line.lower_shift)
                if line.upper_shift is not None:
                    constant = constant + _dot(negative, line.upper_shift)
                A = positive * line.lower_slope.unsqueeze(1)
                send(node.inputs[0], A.addcmul_(negative, line.upper_slope.unsqueeze(1)))
    if 0 not in pending:
        return constant
    A = pending[0]
    constant = constant + _dot(A, ball.center)
    flat = _flat(A)
    # In place: A is not used again.
    dual = flat.norm(dim=-1) if ball.norm == 2 else flat.abs_().sum(-1)
    return constant - ball.radius.unsqueeze(1) * dual


def _tighten(
    head: Head,
    ball: Ball,
    boxes: Sequence[Bounds],
    lines: Mapping[int, Lines],
    target: int,
    specs: int,
) -> Bounds:
    """Return CROWN bounds of a node, computed for `specs` coordinates at a time.

    Bounds of the output are intersected with its box.
    """
    box = boxes[target]
    shape = box.lower.shape
    size = shape[1:].numel()
    parts = []
    for start in range(0, size, specs):
        count = min(specs, size - start)
        rows = torch.arange(count, device=box.lower.device)
        unit = box.lower.new_zeros(count, size)
        unit[rows, rows + start] = 1
        # The upper bound of a coordinate is minus the lower bound of its negative.
        both = torch.cat([unit, -unit]).view(1, 2 * count, *shape[1:])
        bound = _lower_bound(head, ball, boxes, lines, target, both)
        parts.append(bound.expand(shape[0], -1).reshape(shape[0], 2, count))
    bound = torch.cat(parts, dim=2)
    lower, upper = bound[:, 0].reshape(shape), -bound[:, 1].reshape(shape)
    if target != head.output:
        # Not intersected: the linear functions that follow are evaluated on exactly this range,
        # and lines for a smaller one could give a larger ball smaller bounds.
        known = lower.isfinite() & upper.isfinite()
        lower, upper = lower.where(known, box.lower), upper.where(known, box.upper)
        return Bounds(lower, torch.maximum(lower, upper))
    # fmax and fmin ignore NaN, which an infinite radius makes of a linear bound: the row then
    # keeps its box. Rounding may push a bound past the other end.
    lower = torch.fmin(torch.fmax(lower, box.lower), box.upper)
    upper = torch.fmax(torch.fmin(upper, box.upper), lower)
    return Bounds(lower, upper)


def _loose(head: Head, norm: float) -> list[bool]:
    """Return, for every node, whether its IBP box can be larger than its range.

    Boxes are exact as long as the coordinates vary independently of each other, and after
    one affine map of independent coordinates, or of the ball. CROWN cannot improve on them.
    """
    independent, exact, loose = range(3)
    states = [independent]
    for node in head.nodes[1:]:
        state = max(states[i] for i in node.inputs)
        match node.rule:
            case Sum():
                state = state if len(node.inputs) == 1 else loose
            case Activation():
                # The coordinates of an L2 ball depend on each other; only the ball's own
                # affine image is exact.
                state = exact if norm == 2 and state == independent else state
            case Affine(reshapes=False):
                state = exact if state == independent else loose
        states.append(state)
    return [state == loose for state in states]


def _portions(head: Head, sizes: Sequence[int], norm: float) -> tuple[int, dict[int, int]]:
    """Return the rows per step, and for each node to tighten the coordinates per step.

    The nodes to tighten are the output and the inputs of activations, unless the box is exact.
    """
    loose = _loose(head, norm)
    entering = [n.inputs[0] for n in head.nodes if isinstance(n.rule, Activation)]
    targets = [i for i in (*entering, head.output) if loose[i]]
    largest = max(sizes)
    # A coordinate has two bounds, and coefficients have a positive and a negative part.
    coefficients = balls.ELEMENTS // 4
    rows = max(1, coefficients // (max((sizes[i] for i in targets), default=1) * largest))
    return rows, dict.fromkeys(targets, max(1, coefficients // (rows * largest)))


def _crown_rows(head: Head, ball: Ball, specs: Mapping[int, int]) -> Bounds:
    """Return the bounds of a few rows; ``specs`` has the coordinates per step of each node."""
    boxes = [box_of(value) for value in intervals(head, ball)]
    point = ball._replace(radius=torch.zeros_like(ball.radius))
    centers = [box_of(value).lower for value in intervals(head, point)]
    lines: dict[int, Lines] = {}
    remaining = dict(specs)

    def tightened(i: int) -> Bounds:
        if i in remaining:
            boxes[i] = _tighten(head, ball, boxes, lines, i, remaining.pop(i))
        return boxes[i]

    for i, node in enumerate(head.nodes):
        if isinstance(node.rule, Activation):
            lines[i] = node.rule.lines(*tightened(node.inputs[0]), centers[node.inputs[0]])
    return tightened(head.output)
