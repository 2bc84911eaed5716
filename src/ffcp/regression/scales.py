"""Scales: what residuals are divided by, for each input."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires, is_traced
from ffcp.description import Described, describe, name_of
from ffcp.network import jacobian
from ffcp.network.features import OUTPUT, resolve
from ffcp.network.forward import candidates
from ffcp.network.jacobian import Method
from ffcp.regression.intervals import Base, Ends, as_float64

AUTO = "auto"


class Scale(Protocol):
    """The interface of a scale; a plain function of :class:`ffcp.BatchOutput` also works."""

    def requires(self) -> Requires:
        """Return which layers' norms or values the pass over the model must compute."""

    def __call__(self, out: BatchOutput) -> Tensor:
        """Return one positive number per row, (n,) or (n, 1), or per output of the model."""


class Constant(Described):
    """The same scale everywhere: plain conformal prediction.

    The constructor takes no arguments.

    Parameters
    ----------
    out : BatchOutput
        Of the call: the output of one pass over a batch.

    Examples
    --------
    >>> out = BatchOutput(None, torch.zeros(3, 1), {}, {}, range(3))
    >>> Constant()(out)
    tensor(1., dtype=torch.float64)
    """

    #: Whether all it returns is known to be positive and finite, and need not be checked.
    is_positive = True

    def requires(self) -> Requires:
        """Return that nothing is required."""
        return Requires()

    def __call__(self, out: BatchOutput) -> Tensor:
        """Return the number 1."""
        return torch.ones((), dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class GradientNorm(Described):
    """The norm of the gradient of each output with respect to a layer (the paper's FFCP).

    Parameters
    ----------
    feature : str or sequence of str, default="auto"
        Where the gradient is taken: a dotted module name, ``"input"``, ``"output"`` (scale 1),
        ``"auto"``, or a list of names to select from. ``"auto"`` tries at most 8 layers spread
        over the depth, and plain CP.
    norm : float, default=2
        1, 2 or ``inf``.
    floor : float, default=1e-6
        Smallest scale, for gradients that vanish. A constant; it must not be estimated from the
        calibration data.
    method : str, Sketch or Smooth, default="auto"
        How the gradients of many outputs are taken, see :func:`ffcp.gradient_norms`.

    Examples
    --------
    >>> scale = GradientNorm("trunk.4", floor=0.5)
    >>> scale.requires().norms
    ('trunk.4',)
    >>> norms = {"trunk.4": torch.tensor([[0.1], [2.0]])}
    >>> scale(BatchOutput(None, torch.zeros(2, 1), norms, {}, range(2)))[:, 0]
    tensor([0.5000, 2.0000], dtype=torch.float64)
    """

    feature: str | Sequence[str] = AUTO
    norm: float = 2
    floor: float = 1e-6
    method: Method = jacobian.AUTO
    what = "the feature"
    is_positive = True  # by the floor

    def __post_init__(self) -> None:
        if not 0 < self.floor < math.inf:
            raise ValueError(f"'floor' must be a positive number, got {self.floor}")
        names = [self.feature] if isinstance(self.feature, str) else list(self.feature)
        if not names:
            raise ValueError("the list of candidate features is empty")
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"'feature' must be the name of a layer, got {self.feature!r}")
        jacobian.checked_norm(self.norm)
        jacobian.checked_method(self.method)

    def requires(self) -> Requires:
        """Return the norms at the feature, or at all that are named."""
        names = (self.feature,) if isinstance(self.feature, str) else tuple(self.feature)
        return Requires(
            norms=() if self.feature == AUTO else names, norm=self.norm, method=self.method
        )

    def __call__(self, out: BatchOutput) -> Tensor:
        """Return the norms, no smaller than the floor."""
        assert isinstance(self.feature, str)
        if self.feature == OUTPUT:
            return torch.ones((), dtype=torch.float64, device="cpu")
        # A zero gradient is legal, and gets the fixed floor.
        return as_float64(out.norms[self.feature]).clamp_min(self.floor)

    @property
    def is_open(self) -> bool:
        """Whether the feature is still to be selected."""
        return self.feature == AUTO or not isinstance(self.feature, str)

    def options(self, model: nn.Module, x: Any) -> dict[str, Scale]:
        """Return the scales to select from, by name; plain CP is always one."""
        names = candidates(model, x) if self.feature == AUTO else self.feature
        return {name: replace(self, feature=name) for name in dict.fromkeys([OUTPUT, *names])}


@dataclass(frozen=True)
class FunctionScale(Described):
    """A scale from a function of the output of one pass.

    Parameters
    ----------
    function : callable
        From :class:`ffcp.BatchOutput` to one positive number per row, (n,), or per output.
    norms, values : sequence of str, default=()
        Layers whose gradient norms or values it uses.
    name : str, default=None
        Its name in saved settings; by default that of the function.

    Examples
    --------
    >>> spread = FunctionScale(lambda out: 0.1 + out.values["0"].std(dim=1), values=["0"])
    >>> spread.requires().values
    ('0',)
    """

    function: Callable[[BatchOutput], Tensor]
    norms: Sequence[str] = ()
    values: Sequence[str] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a scale is a function of a BatchOutput, got {self.function!r}")
        object.__setattr__(self, "name", self.name or name_of(self.function))

    def requires(self) -> Requires:
        """Return the layers it uses, and the input."""
        return Requires(tuple(self.norms), tuple(self.values), input=True)

    def __call__(self, out: BatchOutput) -> Tensor:
        """Call the function."""
        return torch.as_tensor(self.function(out))


@dataclass(frozen=True)
class CandidateScales(Described):
    """Scales to select from, by the length of their intervals on rows that do not calibrate.

    Plain CP is always among them.

    >>> CandidateScales([GradientNorm("0"), lambda out: 1 + out.output.abs()]).is_open
    True
    """

    scales: Sequence[Any]
    is_open = True
    what = "the scale"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", tuple(as_scale(scale) for scale in self.scales))
        if any(getattr(scale, "is_open", False) for scale in self.scales):
            raise ValueError(
                "each scale of a list must be settled, got one with feature='auto' or several "
                "layers: name one layer in each"
            )
        described: list[Any] = []
        for scale in map(describe, self.scales):
            if scale in described:
                raise ValueError(
                    f"two scales are both {scale}, so that a file could not tell them apart: give "
                    "each a name, ffcp.scales.FunctionScale(function, name=...)"
                )
            described.append(scale)

    def requires(self) -> Requires:
        """Return what any of them requires."""
        every = (scale.requires() for scale in self.scales)
        requires: Requires = functools.reduce(Requires.joined, every)
        # A scale of the user's may use the input without declaring it.
        are_ours = all(isinstance(scale, (Constant, GradientNorm)) for scale in self.scales)
        return requires._replace(input=not are_ours)

    def options(self, model: nn.Module, x: Any) -> dict[str, Scale]:
        """Return the scales to select from, by name."""
        options: dict[str, Scale] = {OUTPUT: Constant()}
        for scale in self.scales:
            name = getattr(scale, "feature", None) or name_of(scale)
            options[name if name not in options else f"{name} {len(options)}"] = scale
        return options


def gradient_norm(
    model: nn.Module,
    feature: str | nn.Module | Sequence[str | nn.Module] = AUTO,
    norm: float = 2,
    floor: float = 1e-6,
    method: Method = jacobian.AUTO,
) -> GradientNorm:
    """Return the scale of FFCP for a model; layers may be given as modules.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> gradient_norm(model, model[0]).feature
    '0'
    """
    names: str | list[str]
    if isinstance(feature, (str, nn.Module)):
        names = AUTO if feature == AUTO else resolve(model, feature)
    elif isinstance(feature, int):
        raise TypeError(f"'feature' is the name of a layer: give {str(feature)!r}, not {feature}")
    else:
        names = [resolve(model, layer) for layer in feature]
    return GradientNorm(names, norm, floor, method)


def as_scale(scale: Any) -> Any:
    """Return a scale as it is; a function as a scale.

    >>> as_scale(lambda out: out.output.abs()).requires()
    Requires(norms=(), values=(), norm=2, method='auto', of=None, input=True, logits=False)
    """
    if scale is None:
        return Constant()
    if isinstance(scale, (list, tuple)):
        return CandidateScales(scale)
    return scale if hasattr(scale, "requires") else FunctionScale(scale)


def ends_of(base: Base, scale: Scale, out: BatchOutput) -> Ends:
    """Return the base interval of a batch, and its scales."""
    values = scale(out)
    if not getattr(scale, "is_positive", False):
        values = checked_scale(values, out)
    return base(out, values)


def checked_scale(scale: Tensor, out: BatchOutput) -> Tensor:
    """Return a scale in the shape of the output; raise ValueError unless it is positive."""
    output, rows = out.output, out.output.shape[0]  # len() would be a constant in exported files
    if scale.dim() and scale.shape != output.shape:
        if scale.shape not in ((rows,), (rows, 1)):
            raise ValueError(
                f"the scale has shape {tuple(scale.shape)}, the model output "
                f"{tuple(output.shape)}: it needs one number per row, (n,), or one per output"
            )
        scale = scale.reshape(-1, *[1] * (output.dim() - 1)).expand_as(output)
    if is_traced():
        return scale
    low, high = (end.item() for end in scale.aminmax())
    if not (low > 0 and high < math.inf):  # both are False for NaN
        bad = ~((scale > 0) & scale.isfinite()).expand_as(output).reshape(rows, -1).all(dim=1)
        raise ValueError(
            f"the scale of row {out.rows[int(bad.nonzero()[0, 0])]} is not a positive number: add "
            "a small constant to it"
        )
    return scale
