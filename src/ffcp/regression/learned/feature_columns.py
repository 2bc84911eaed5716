"""The columns that quantiles of the residual are learned from, all computed by one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires, is_traced
from ffcp.description import Described
from ffcp.network import arrays, forward, inputs
from ffcp.network.features import INPUT
from ffcp.network.forward import candidates

PREDICTION, NORMS, VALUES = "prediction", "norms", "values"
KINDS = (PREDICTION, NORMS, VALUES, INPUT)
_MOST_COLUMNS = 1024  # of a layer's values or of the input; more are left out
_MOST_OUTPUTS = 64
_SMALL_NORM, _SMALL_PREDICTION = 1e-3, 1e-2  # of what is typical; logarithms end there
_NEAR, _WIDE = 2.0**-20, 4  # rounding errors: a share of a column's largest number, and a multiple

On = str | Callable[[BatchOutput], Tensor]


@dataclass(frozen=True)
class FeatureColumns(Described):
    """Which parts of a pass are learned from.

    Parameters
    ----------
    norms
        Layers whose gradient norms are columns.
    values
        A layer whose values are columns, the last ones; ``None``: none.
    takes_input
        Whether the columns of the input are among them.
    functions
        Functions of :class:`ffcp.BatchOutput` that give further columns, (n,) or (n, k).
    width
        How many values the layer has.

    Examples
    --------
    >>> out = BatchOutput(None, torch.ones(3, 1), {"0": torch.ones(3, 1)}, {}, range(3))
    >>> FeatureColumns(norms=("0",)).columns(out).shape  # prediction, and norm
    torch.Size([3, 2])
    """

    norms: Sequence[str] = ()
    values: str | None = None
    takes_input: bool = False
    functions: Sequence[Callable[[BatchOutput], Tensor]] = ()
    width: int = 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: Any,
        on: Sequence[On] | None,
        layers: Sequence[str] | None = None,
    ) -> FeatureColumns:
        """Find the layers of a model, if they are not given, and leave out all but tables.

        By default the input of a table and hidden values are learned from, to which norms add
        nothing (docs/bands.md); for images and text it is norms and values.
        """
        if on is None:
            on = (PREDICTION, VALUES, INPUT if _is_table(x) else NORMS)
        names = layers or ()
        if layers is None and {NORMS, VALUES} & set(on):
            names = candidates(model, x)
        layer = None
        if VALUES in on:
            layer = next((name for name in reversed(names) if name != INPUT), None)
        requires = Requires(values=() if layer is None else (layer,))
        out = forward.run_batch(model, inputs.take(x, slice(0, 2)), requires)
        outputs = out.output[0].numel()
        if outputs > _MOST_OUTPUTS:
            raise ValueError(
                f"the model has {outputs} outputs, and quantiles are learned for at most "
                f"{_MOST_OUTPUTS}: use ffcp.CP or ffcp.FFCP"
            )
        width = 0 if layer is None else out.values[layer][0].numel()
        if width > _MOST_COLUMNS:
            layer, width = None, 0
        return cls(
            norms=tuple(names) if NORMS in on else (),
            values=layer,
            takes_input=INPUT in on and _is_table(x),
            functions=[source for source in on if callable(source)],
            width=width,
        )

    def requires(self) -> Requires:
        """Return norms, values and whether the input is looked at."""
        values = () if self.values is None else (self.values,)
        return Requires(tuple(self.norms), values, input=self.takes_input or bool(self.functions))

    def columns(self, out: BatchOutput) -> Tensor:
        """Return the columns (n, k) in float32 on the CPU, not transformed."""
        parts = [out.output, *(out.norms[name] for name in self.norms)]
        if self.takes_input:
            parts.append(next(tensor for _, tensor in inputs.leaves(out.x)))
        parts += [function(out) for function in self.functions]
        if self.values is not None:
            parts.append(out.values[self.values])
        table = torch.cat([_table(part, out.output.shape[0]) for part in parts], dim=1)
        if not is_traced():
            arrays.check_finite(table, "what is learned from", out.rows[0])
        return table

    def logarithmic(self, columns: Tensor, typical: Tensor) -> Tensor:
        """Add logarithms of predictions, and take those of norms, cut where they are tiny."""
        outputs = len(typical) // (1 + len(self.norms))
        logs = columns[:, : len(typical)].abs().maximum(typical).log()
        return torch.cat([columns[:, :outputs], logs, columns[:, len(typical) :]], dim=1)

    def without_hidden(self, columns: Tensor) -> int:
        """Return how many columns remain without hidden values, if a table's input is learned from.

        Hidden values mislead trees, and networks with few rows (docs/bands.md).
        """
        return columns.shape[1] - (self.width if self.takes_input else 0)

    def tied(self, columns: Tensor, typical: Tensor) -> Tensor:
        """Merge numbers that differ by rounding errors of the model.

        A tree would split between them, and they change with the batch size.
        """
        computed = len(typical) if self.takes_input else columns.shape[1]
        parts = columns.split([computed, columns.shape[1] - computed], dim=1)
        return torch.cat([*map(_tied, parts[0].split(64, dim=1)), parts[1]], dim=1)

    def typical(self, columns: Tensor, outputs: int) -> Tensor:
        """Learn below which size predictions and norms are tiny."""
        sizes = columns[:, : outputs * (1 + len(self.norms))].abs().median(dim=0).values
        share = torch.full_like(sizes, _SMALL_NORM)
        share[:outputs] = _SMALL_PREDICTION
        return (sizes * share).clamp_min(torch.finfo(torch.float32).tiny)


def _tied(columns: Tensor) -> Tensor:
    """Replace numbers that lie closer together than rounding errors by the middle between them.

    >>> _tied(torch.tensor([[2.0], [1.0], [2.000001], [1.5]]))[:, 0]
    tensor([2.0000, 1.0000, 2.0000, 1.5000])
    """
    ordered, place = columns.sort(dim=0)
    near = ordered.abs().amax(dim=0) * _NEAR
    is_apart, edge = ordered.diff(dim=0) > near, torch.ones_like(ordered[:1], dtype=torch.bool)
    inf = torch.full_like(ordered, torch.inf)
    first = torch.where(torch.cat([edge, is_apart]), ordered, -inf).cummax(dim=0).values
    last = torch.where(torch.cat([is_apart, edge]), ordered, inf).flip(0).cummin(dim=0).values
    width = last.flip(0) - first
    middle = torch.where(width <= _WIDE * near, first + width / 2, ordered)
    return torch.empty_like(columns).scatter_(0, place, middle)


def checked_on(on: On | Sequence[On] | None) -> tuple[On, ...] | None:
    """Return valid sources to learn from; ``None`` selects them by the kind of input.

    >>> checked_on("norms")
    ('norms',)
    """
    if on is None:
        return None
    sources = (on,) if isinstance(on, str) or callable(on) else tuple(on)
    if not sources or not all(callable(source) or source in KINDS for source in sources):
        raise ValueError(
            f"quantiles are learned from {', '.join(map(repr, KINDS))}, or functions of a "
            f"BatchOutput; got {on!r}"
        )
    return sources


def _table(values: Any, rows: int) -> Tensor:
    tensor = torch.as_tensor(values)
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise ValueError(
            f"features learned from have shape {tuple(tensor.shape)} for {rows} rows: expected one "
            "row for each"
        )
    return tensor.detach().reshape(rows, -1).to("cpu", torch.float32)


def _is_table(x: Any) -> bool:
    """Whether an input is one table of numbers, and no image or text."""
    tensors = [tensor for _, tensor in inputs.leaves(x)]
    return (
        len(tensors) == 1
        and tensors[0].is_floating_point()
        and tensors[0].dim() == 2
        and tensors[0].shape[1] <= _MOST_COLUMNS
    )
