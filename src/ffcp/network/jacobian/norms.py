"""The norm of each row of a gradient, in a type in which squares do not overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Give the type in which squares do not overflow."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def row_norms(gradients: Sequence[Tensor], norm: float) -> Tensor:
    """Give the norm of each row over all dimensions and all tensors of one feature.

    >>> row_norms([torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0], [1.0]])], 2)
    tensor([5., 1.])
    """
    parts = [gradient.reshape(gradient.shape[0], -1) for gradient in gradients]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    rows = rows.to(wide(rows.dtype))
    if norm == 2:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms
    # vector_norm is 15 times slower than these two for norms other than 2.
    return rows.abs().sum(dim=1) if norm == 1 else rows.abs().amax(dim=1)


def reached(name: str, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Keep the tensors of a feature that the output depends on; there has to be one."""
    kept = [gradient for gradient in gradients if gradient is not None]
    if not kept:
        raise ValueError(f"feature {name!r} does not influence the output: choose another layer")
    return kept
