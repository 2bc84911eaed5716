"""What scales, scores and calibrations require of a pass over the model, and what it returns.

Requirements are joined, one pass over a batch computes all of them, and each object reads its own
part. The module imports nothing of ffcp, so that networks and statistics can both use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

_TRACED: ContextVar[bool] = ContextVar("traced", default=False)


def is_traced() -> bool:
    """Whether a graph is being traced, so that tensors have no values.

    Checks of values, and shortcuts that depend on them, are then left out.

    >>> is_traced()
    False
    """
    return _TRACED.get()


@contextmanager
def traced() -> Iterator[None]:
    """Mark the block as tracing: :func:`is_traced` is True in it."""
    token = _TRACED.set(True)
    try:
        yield
    finally:
        _TRACED.reset(token)


class Requires(NamedTuple):
    """What a scale, score or calibration requires of the pass over the model.

    Parameters
    ----------
    norms : tuple of str, default=()
        Names of the features whose gradient norms the pass computes.
    values : tuple of str, default=()
        Names of the layers whose values it records.
    norm : float, default=2
        Which norm of the gradient: 1, 2 or ``math.inf``.
    method : str, Sketch or Smooth, default="auto"
        How it is computed: see :func:`ffcp.gradient_norms`.
    of : callable, default=None
        A function from the output (n, ...) to one number per row, (n,), whose gradient is taken
        in place of that of every output. ``None``: of every output.
    input : bool, default=False
        Whether the input itself is needed, so that it is kept for rows that wait for a selection.
    logits : bool, default=False
        Whether the output must have a logit for every class: one logit z, of the second of two
        classes, then becomes (0, z).

    Examples
    --------
    >>> requires = Requires(norms=("trunk.4",)).joined(Requires(values=("input",)))
    >>> requires.norms, requires.values
    (('trunk.4',), ('input',))
    """

    norms: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    norm: float = 2
    method: Any = "auto"
    of: Callable[[Tensor], Tensor] | None = None
    input: bool = False
    logits: bool = False

    def joined(self, other: Requires) -> Requires:
        """Return the requirements of both.

        Raises ValueError if both require gradient norms, but of different kinds.
        """
        if not (other.norms or other.values or other.input or other.logits):
            return self
        for setting in ("norm", "method", "of"):
            own, added = getattr(self, setting), getattr(other, setting)
            if self.norms and other.norms and own != added:
                raise ValueError(
                    f"one pass takes one kind of gradient norm, but one part requires "
                    f"{setting}={own!r} and another {setting}={added!r}: use the same for both"
                )
        kind = self if self.norms or not other.norms else other
        return kind._replace(
            norms=tuple(dict.fromkeys(self.norms + other.norms)),
            values=tuple(dict.fromkeys(self.values + other.values)),
            input=self.input or other.input,
            logits=self.logits or other.logits,
        )


class BatchOutput(NamedTuple):
    """The output of one pass over the model for a batch.

    Attributes
    ----------
    x : Tensor, tuple or dict
        The batch, as the model takes it.
    output : Tensor
        What the model returned, detached: (n, ...).
    norms : mapping of str to Tensor
        Gradient norms by feature, in the shape of the output; with ``Requires.of`` (n,) in float64.
    values : mapping of str to Tensor
        Values by layer, as they were when the layer returned them.
    rows : range or list of int
        The numbers of these rows in the data, for error messages.
    groups : sequence, default=None
        The groups of these rows, if the user gave any.
    weights : Tensor, default=None
        The weights of these rows, (n,), if the user gave any.
    random : Tensor, default=None
        A uniform random number for each row, (n,), where a score is randomised.
    columns : sequence of str or int, default=None
        The columns of the frame that was given, where ``x`` was one.

    Examples
    --------
    >>> import ffcp, torch
    >>> def scale(out: BatchOutput) -> torch.Tensor:  # wider where the first column is large
    ...     return 0.1 + out.x[:, :1].abs()
    >>> predictor = ffcp.IntervalPredictor(torch.nn.Linear(2, 1), scale=scale)
    >>> predictor = predictor.calibrate(torch.randn(99, 2), torch.randn(99))
    >>> width = predictor.predict_interval(torch.tensor([[0.0, 1.0], [2.0, 1.0]])).width
    >>> round(float(width[1] / width[0]))  # (0.1 + 2) / (0.1 + 0)
    21
    """

    x: Any
    output: Tensor
    norms: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    rows: Sequence[int]
    groups: Any = None
    weights: Tensor | None = None
    random: Tensor | None = None
    columns: Sequence[str | int] | None = None
