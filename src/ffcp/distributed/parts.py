"""Calibrations in parts: what a process sends of its own, and how those of all are merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor

from ffcp.predictor import Predictor

Kind = TypeVar("Kind", bound=Predictor)
State = dict[str, Tensor]  # a calibration as files hold it


def state_of(predictor: Predictor) -> State:
    """Return a calibration without the model, in tensors that can be sent by themselves."""
    return {name: tensor.detach().cpu().clone() for name, tensor in predictor.state().items()}


def merged(predictor: Kind, states: Iterable[State], rank_error: Any = None) -> Kind:
    """Return a predictor with the scores of all states, in their order; summed up if asked for.

    Neighbours are merged first, so that no score is copied often.
    """
    waiting: list[tuple[int, Kind]] = []  # how many states were merged in each, fewer and fewer
    for state in states:
        count, part = 1, predictor.restored(state)
        while waiting and waiting[-1][0] == count:
            part = waiting.pop()[1].merge(part)
            count *= 2
        waiting.append((count, part))
    if not waiting:
        raise ValueError("the calibration data is empty: there are no rows to score")
    parts = [part for _, part in waiting]
    while len(parts) > 1:
        last = parts.pop()
        parts[-1].merge(last)
    return parts[0] if rank_error is None else parts[0].compress(rank_error)
