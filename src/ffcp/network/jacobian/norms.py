"""Which norm of a gradient, how it is taken when there are many outputs, and the norm of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffcp.description import Described

EXACT, COLOURED, AUTO = "exact", "coloured", "auto"


@dataclass(frozen=True)
class Sketch(Described):
    """Estimate the norms of all rows at once from random probes (L2 norm only).

    For random signs u, the mean of (J u)^2 is the squared norm of every row of J; ``probes`` of
    them leave a relative error of about 1 / sqrt(2 * probes). A probe costs what a forward pass
    through the head costs, however many outputs there are. The signs are the same for every
    input, so the estimate is a fixed function of the input: it can cost width, never coverage.
    Where the head is linear the error is the same for all inputs and costs nothing at all.

    Parameters
    ----------
    probes : int, default=32
        How many.
    seed : int, default=0
        Of the signs.

    Examples
    --------
    >>> import ffcp, torch
    >>> model = torch.nn.Linear(1000, 2)
    >>> x = torch.zeros(1, 1000)
    >>> _, norms = ffcp.gradient_norms(model, x, ["input"], method=Sketch(400))
    >>> bool(((norms["input"] / model.weight.norm(dim=1) - 1).abs() < 0.2).all())
    True
    """

    probes: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise ValueError(f"a sketch needs at least one probe, got {self.probes}")

    def __str__(self) -> str:
        return f"sketch({self.probes}, seed={self.seed})"


@dataclass(frozen=True)
class Smooth(Described):
    """Take the mean norm over perturbed features, for gradients that vanish.

    Where ReLUs are dead the gradient is zero though a small step would change the output. The
    mean over ``samples`` features with normal noise sees such steps. The noise is the same for
    every input, so the score stays a fixed function of the input.

    Parameters
    ----------
    sigma : float
        Standard deviation of the noise, in units of the feature. A constant: it must not be
        estimated from the calibration data.
    samples : int, default=8
        How many perturbed features; each costs a pass through the model.
    seed : int, default=0
        Of the noise.
    method : str or Sketch, default="auto"
        How the norms of each pass are taken: ``"auto"``, ``"exact"``, ``"coloured"`` or a
        :class:`Sketch`.

    Examples
    --------
    >>> import ffcp, torch
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1, 1, bias=False))
    >>> _ = torch.nn.init.constant_(model[1].weight, 3.0)
    >>> x = torch.tensor([[-0.1]])  # the ReLU is dead here
    >>> ffcp.gradient_norms(model, x, ["input"])[1]["input"].item()
    0.0
    >>> smooth = Smooth(sigma=1.0, samples=100)
    >>> bool(ffcp.gradient_norms(model, x, ["input"], method=smooth)[1]["input"] > 1)
    True
    """

    sigma: float
    samples: int = 8
    seed: int = 0
    method: str | Sketch = AUTO

    def __post_init__(self) -> None:
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"'sigma' must be a positive number, got {self.sigma}")
        if self.samples < 1:
            raise ValueError(f"smoothing needs at least one sample, got {self.samples}")
        if isinstance(checked_method(self.method), Smooth):
            raise TypeError(
                "'method' of a Smooth cannot be a Smooth: use 'auto', 'exact', 'coloured' or a "
                "Sketch"
            )

    def __str__(self) -> str:
        return f"smooth({self.sigma:g}, {self.samples}, seed={self.seed}, {self.method})"


Method = str | Sketch | Smooth


def checked_method(method: Method) -> Method:
    """Return the method; raise ValueError if it is unknown.

    >>> checked_method("coloured")
    'coloured'
    """
    if isinstance(method, (Sketch, Smooth)) or method in (AUTO, EXACT, COLOURED):
        return method
    raise ValueError(
        f"'method' must be 'auto', 'exact', 'coloured', Sketch(probes) or Smooth(sigma, samples), "
        f"got {method!r}"
    )


def checked_norm(norm: float) -> float:
    """Return the norm, or raise ValueError if it is not 1, 2 or infinity.

    >>> checked_norm(2)
    2
    """
    if norm not in (1, 2, math.inf):
        raise ValueError(f"'norm' must be 1, 2 or float('inf'), got {norm!r}")
    return norm


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which squares do not overflow."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def row_norms(gradients: Sequence[Tensor], norm: float) -> Tensor:
    """Return the norm of each row over all dimensions and all tensors of one feature.

    >>> row_norms([torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0], [1.0]])], 2)
    tensor([5., 1.])
    """
    rows = gradients[0]
    if len(gradients) > 1 or rows.dim() != 2:
        rows = torch.cat([g.reshape(g.shape[0], -1) for g in gradients], dim=1)
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()  # in which squares do not overflow
    if norm == 2:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms
    # vector_norm is 15 times slower than these two for norms other than 2.
    return rows.abs().sum(dim=1) if norm == 1 else rows.abs().amax(dim=1)


def reached(name: str, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients that are not None; raise ValueError if there is none."""
    kept = [gradient for gradient in gradients if gradient is not None]
    if not kept:
        raise ValueError(f"feature {name!r} does not influence the output: choose another layer")
    return kept
