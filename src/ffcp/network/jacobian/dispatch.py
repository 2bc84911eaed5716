"""Pick how the gradient norms of a pass are taken, and take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.batch import Requires
from ffcp.network.cut import Cut, Tapped
from ffcp.network.jacobian import chained, coloured, norms, pushed
from ffcp.network.jacobian.coloured import HiddenWindowsError
from ffcp.network.jacobian.exact import exact
from ffcp.network.jacobian.norms import AUTO, COLOURED, EXACT, Sketch, Smooth

# How ``"auto"`` picks: outputs so few that probing the head does not pay; coloured passes and
# outputs so many that an estimate is better.
_FEW_OUTPUTS = 64
_MANY_PASSES = 256
_MANY_OUTPUTS = 4096
_PUSHED_COST = 2  # of a tangent pushed forward, against a backward pass


def take_norms(
    model: nn.Module, x: Any, tap: Tapped, names: Sequence[str], requires: Requires
) -> dict[str, Tensor]:
    """Take the norms at the named features that ``requires`` asks for, from a pass over ``x``."""
    if not names:
        return {}
    method = norms.checked_method(requires.method)
    norm = norms.checked_norm(requires.norm)
    if isinstance(method, Smooth):
        return {name: _smoothed(model, x, name, requires) for name in names}
    if isinstance(method, Sketch):
        if requires.of is not None:
            raise ValueError("one number per row has one gradient: nothing to sketch, use 'exact'")
        if norm != 2:
            raise ValueError(f"a sketch estimates the L2 norm only, not norm={norm}")
        return {name: pushed.sketched(model, x, name, tap, method) for name in names}
    outputs = tap.prediction[0].numel()
    is_few = outputs <= _FEW_OUTPUTS and method != COLOURED
    if requires.of is not None or outputs == 1 or is_few:
        return exact(tap, norm, requires.of)
    if method == EXACT:
        return _exact(model, x, tap, norm)
    return {name: _mapped(model, x, tap.only(name), name, method, norm) for name in names}


def _smoothed(model: nn.Module, x: Any, name: str, requires: Requires) -> Tensor:
    """Take the mean norm over features moved by normal noise, the same for every row."""
    method: Smooth = requires.method
    totals: list[Tensor] = []
    for sample in range(method.samples):
        # Two numbers make one seed, so that streams of neighbouring seeds do not meet.
        mixed = np.random.SeedSequence([method.seed, sample]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0]) >> 1)

        def moved(value: Tensor, generator: torch.Generator = generator) -> Tensor:
            shape = value.shape[1:]
            noise = torch.randn(shape, generator=generator, dtype=torch.float32)
            return value + method.sigma * noise.to(value)

        with Cut(model, [name], change=moved) as cut:
            each = requires._replace(method=method.method)
            totals.append(take_norms(model, x, cut(x), [name], each)[name])
    return torch.stack(totals).cpu().double().mean(dim=0).to(totals[0])


def _exact(model: nn.Module, x: Any, tap: Tapped, norm: float) -> dict[str, Tensor]:
    """Take exact norms: those at narrow features from their side, the others from the outputs'."""
    tried = {name: _narrow(model, x, tap, name, norm) for name in tap.edges}
    narrow = {name: norms for name, norms in tried.items() if norms is not None}
    rest = [name for name in tap.edges if name not in narrow]
    # One backward pass for each output serves all that are left.
    return {**narrow, **(exact(tap.only(*rest), norm) if rest else {})}


def _narrow(model: nn.Module, x: Any, tap: Tapped, name: str, norm: float) -> Tensor | None:
    """Take exact norms from the feature's side; ``None`` where that takes more passes."""
    if tap.moved:
        return None
    outputs, width = tap.prediction[0].numel(), pushed.width(tap, name)
    layers = chained.chain(model, name, tap)
    if layers is not None and chained.passes(layers, width, norm) < outputs:
        with Cut(model, values=(name,)) as cut:
            feature = cut(x).values[name]
        return chained.chained(feature, layers, norm).view_as(tap.prediction)
    if width * _PUSHED_COST > outputs:
        return None
    try:
        return pushed.pushed(model, x, name, tap, norm)
    except ValueError:  # an operation that no tangent can be pushed through
        return None


def _mapped(model: nn.Module, x: Any, tap: Tapped, name: str, method: str, norm: float) -> Tensor:
    """Colour if that was asked for or, for ``"auto"``, if it pays and is right."""
    outputs = tap.prediction[0].numel()
    estimate = outputs > _MANY_OUTPUTS and norm == 2
    if method == AUTO and not estimate:
        narrow = _narrow(model, x, tap, name, norm)
        if narrow is not None:
            return narrow
    colours = coloured.colours(model, x, name)
    if method == COLOURED:
        if colours is None:
            raise ValueError(
                f"the head behind {name!r} cannot be coloured: its feature has shape "
                f"{tuple(tap.shapes[name][0])} and its output {tuple(tap.prediction.shape)}, and "
                "both must be maps (rows, channels, positions ...). Use method='exact' or Sketch"
            )
        return coloured.coloured(tap, name, colours, norm)
    if colours and colours.passes <= min(outputs // 2, _MANY_PASSES):
        try:
            return coloured.coloured(tap, name, colours, norm)
        except HiddenWindowsError:
            # Rows before these have exact norms. Estimates of the others would be other scores.
            if colours.proved and estimate:
                raise
    return pushed.sketched(model, x, name, tap, Sketch()) if estimate else exact(tap, norm)[name]
