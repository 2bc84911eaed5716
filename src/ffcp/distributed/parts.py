"""Partial calibrations: the state that a process sends, and the merge of all states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor

from ffcp.predictor import Predictor

P = TypeVar("P", bound=Predictor)
State = dict[str, Tensor]  # a calibration as in saved files


def state_of(predictor: Predictor) -> State:
    """Return a calibration without the model, as CPU tensors that can be sent."""
    return {name: tensor.detach().cpu().clone() for name, tensor in predictor.state().items()}


def merged(predictor: P, states: Iterable[State], rank_error: Any = None) -> P:
    """Return a predictor with the scores of all states, in order; compressed with a rank_error.

    Neighbours are merged first, so that each score is copied only a few times.
    """
    waiting: list[tuple[int, P]] = []  # the number of states merged in each, descending
    for state in states:
        count, part = 1, predictor.restored(state)
        while waiting and waiting[-1][0] == count:
            part = waiting.pop()[1].merge(part)
            count *= 2
        waiting.append((count, part))
    if not waiting:
        raise ValueError("the calibration data is empty: no rank has rows to score")
    parts = [part for _, part in waiting]
    while len(parts) > 1:
        last = parts.pop()
        parts[-1].merge(last)
    return parts[0] if rank_error is None else parts[0].compress(rank_error)
