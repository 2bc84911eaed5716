"""IBP: bounds of a head by interval arithmetic, propagated forward through its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.bounds import balls
from ffcp.bounds.balls import Ball, box_of, by_rows, checked_ball, column
from ffcp.bounds.rules import Activation, Affine, Bounds, Own, Sum
from ffcp.bounds.trace import Head, Node, trace


@torch.no_grad()
def ibp(
    head: nn.Module | Head, center: Tensor, radius: float | Tensor, norm: float | str = math.inf
) -> Bounds:
    """Bound a head's outputs over a ball around each row by interval arithmetic.

    The bounds are exact for a single affine layer, for any layers at radius 0, and in the
    infinity norm for elementwise activations followed by one affine layer.

    Parameters
    ----------
    head : nn.Module or Head
        What to bound, taken in eval mode; see `trace` for calling it many times.
    center : Tensor
        Centers of the balls, one per row: shape (n, ...).
    radius : float or Tensor
        One radius for all rows, or a tensor of shape (n,). May be 0 and may be infinite.
    norm : float, default=math.inf
        ``math.inf`` or 2.

    Returns
    -------
    Bounds
        ``lower`` and ``upper``, in the shape of the head's output, infinite where there is
        no bound. They hold up to the rounding of the arithmetic.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from ffcp.bounds import ibp
    >>> head = nn.Sequential(nn.ReLU(), nn.Linear(2, 1))
    >>> _ = nn.init.ones_(head[1].weight), nn.init.zeros_(head[1].bias)
    >>> ibp(head, torch.tensor([[3.0, -1.0]]), 1.0)
    Bounds(lower=tensor([[2.]]), upper=tensor([[4.]]))
    """
    head = head if isinstance(head, Head) else trace(head)
    ball = checked_ball(center, radius, norm)
    rows = balls.ELEMENTS // (2 * max(sizes_per_row(head, ball)))  # an interval has two ends
    return by_rows(lambda part: box_of(intervals(head, part)[head.output]), ball, rows)


def _affine_of_ball(rule: Affine, ball: Ball) -> Ball | Bounds:
    """Return exact bounds of an affine map over a ball: radius times the dual norms of W's rows."""
    middle = rule.apply(ball.center)
    if rule.reshapes:
        return ball._replace(center=middle)
    ones = ball.center.new_ones(1, *ball.center.shape[1:])
    l2 = ball.norm == 2
    dual = rule.push(ones, torch.square).sqrt() if l2 else rule.push(ones, torch.abs)
    spread = column(ball.radius, middle) * dual
    if ball.radius.isinf().any():
        # The spread of an output that does not depend on the input is 0, though inf * 0 is NaN.
        spread = torch.where(dual > 0, spread, 0.0)
    return Bounds(middle - spread, middle + spread)


def _affine_of_box(rule: Affine, box: Bounds) -> Bounds:
    """Return W c + b plus and minus |W| r, for the box's center c and radius r."""
    # A sum is the cheapest way to find an infinity or a NaN anywhere.
    radius = (box.upper - box.lower).mul_(0.5)
    if not math.isfinite(radius.sum()):
        return _affine_of_unbounded(rule, box)
    middle = rule.apply((box.lower + box.upper).mul_(0.5))
    spread = rule.push(radius, torch.abs)
    return Bounds(middle - spread, middle + spread)


def _affine_of_unbounded(rule: Affine, box: Bounds) -> Bounds:
    """Return the same as `_affine_of_box`, with infinite ends handled apart from finite ones."""
    ends = [torch.where(end.isinf(), 0.0, end) for end in box]
    middle = rule.apply((ends[0] + ends[1]) / 2)
    spread = rule.push((ends[1] - ends[0]) / 2, torch.abs)
    open_below, open_above = (end.isinf().to(end.dtype) for end in box)

    def reaches(positive: Tensor, negative: Tensor) -> Tensor:
        """Whether an infinite end has a weight of the sign that makes this bound infinite."""
        through = rule.push(positive, functional.relu) + rule.push(
            negative, lambda W: functional.relu(-W)
        )
        return through > 0

    return Bounds(
        (middle - spread).masked_fill(reaches(open_below, open_above), -math.inf),
        (middle + spread).masked_fill(reaches(open_above, open_below), math.inf),
    )


def _sum_of(node: Node, rule: Sum, values: Sequence[Ball | Bounds]) -> Ball | Bounds:
    """Return the bounds of a sum; a ball that is only scaled and shifted stays one."""
    if len(values) == 1 and isinstance(values[0], Ball) and (scale := rule.scales[0]) != 0:
        center, radius, norm = values[0]
        return Ball(center * scale + rule.shift, radius * abs(scale), norm)
    boxes = [box_of(value) for value in values]
    shapes = {tuple(box.lower.shape[1:]) for box in boxes}
    if len(shapes) > 1:
        different = " and ".join(map(str, sorted(shapes)))
        raise ValueError(f"{node.name!r} adds rows of shapes {different}, expected equal shapes")
    lower = torch.full_like(boxes[0].lower, rule.shift)
    upper = lower.clone()
    for scale, box in zip(rule.scales, boxes, strict=True):
        if scale == 0:  # 0 * inf is NaN
            continue
        low, high = (box.lower, box.upper) if scale > 0 else (box.upper, box.lower)
        lower.add_(low, alpha=scale)
        upper.add_(high, alpha=scale)
    return Bounds(lower, upper)


def intervals(head: Head, ball: Ball) -> list[Ball | Bounds]:
    """Return bounds of every node; the ball itself is kept up to the first affine map."""
    values: list[Ball | Bounds] = [ball]
    for node in head.nodes[1:]:
        inputs = [values[i] for i in node.inputs]
        match node.rule:
            case Sum():
                values.append(_sum_of(node, node.rule, inputs))
            case Activation():
                values.append(node.rule.range(*box_of(inputs[0])))
            case Own(_, bounds):
                values.append(Bounds(*bounds(*box_of(inputs[0]))))
            case Affine():
                value = inputs[0]
                if isinstance(value, Ball):
                    values.append(_affine_of_ball(node.rule, value))
                else:
                    values.append(_affine_of_box(node.rule, value))
    return values


def sizes_per_row(head: Head, ball: Ball) -> list[int]:
    """Return how many values each node has per row, found on a row of zeros."""
    shape = ball.center.shape[1:]
    row = Ball(ball.center.new_zeros(1, *shape), ball.radius.new_zeros(1), ball.norm)
    return [box_of(value).lower.numel() for value in intervals(head, row)]
