"""The only place where tests use private names of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import ffcp
from ffcp import files
from ffcp.calibration_loop import Division
from ffcp.classification import score_selection, scores
from ffcp.classification.set_predictor import _CALIBRATION
from ffcp.conformal.compressed import Compressed
from ffcp.conformal.random_numbers import Draws
from ffcp.regression import auto, comparison
from ffcp.regression.learned import boosting, network, training_rows

#: The format that a saved file names.
FORMAT = files.FORMAT.encode()

C = TypeVar("C", bound=ffcp.calibrations.Calibration)


def filled(calibration: C, values: Tensor, metadata: Mapping[str, Any] | None = None) -> C:
    """Return an empty calibration filled with these scores."""
    return calibration.fit(values, metadata)


def threshold(
    calibration: ffcp.calibrations.Calibration,
    alpha: Any,
    metadata: Mapping[str, Any] | None = None,
    random: Draws | None = None,
) -> Tensor:
    """Return the thresholds: (m,) for all rows, or (n, m) with one for each row."""
    return calibration.quantile(alpha, metadata, random)


def set_aside(
    rows: int,
    fraction: float = 0.2,
    seed: int = 0,
    most: int = 10_000,
) -> Tensor:
    """Return a mask of the first rows of a stream that are set aside for a selection."""
    return Division(fraction, seed, most).mask(rows)


def config(predictor: Any) -> dict[str, Any]:
    """Return the settings that scores and thresholds depend on."""
    compared: dict[str, Any] = predictor.comparable()
    return compared


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Change the tensors and the description of a saved calibration, with a valid checksum."""
    tensors = files.read(path)
    name = "settings" if "settings" in tensors else "_extra_state"
    sealed, prefix = tensors.pop(name), "calibration."
    described = files.unseal(sealed, tensors)
    kept = {n.removeprefix(prefix): tensor.clone() for n, tensor in tensors.items()}
    change(kept, described)
    is_plain = name == "settings"
    own = {n if is_plain or n.startswith("score.") else prefix + n: t for n, t in kept.items()}
    whole = {n: tensor.contiguous() for n, tensor in own.items()}
    if "shapes" in described:  # so that the check of the tensors fails, not that of their shapes
        described["shapes"] = {n: [str(t.dtype), *t.shape] for n, t in whole.items()}
    files.write(path, {**whole, name: files.seal(described, whole)})


def spoil(path: Path, how: str) -> None:
    """Replace tensors of a file without updating its checksum."""
    tensors = files.read(path)
    if how == "a tensor too many":
        tensors["calibration.more"] = torch.zeros(3)
    elif how == "no scores":
        del tensors["calibration.scores"]
    elif how == "no description":
        del tensors["_extra_state"]
    elif how == "a weight of the model":
        tensors["model.0.weight"] = torch.zeros(8, 4)
    elif how == "a number learned":
        tensors["score.learner.w1"][0, 0, 0] += 1
    files.write(path, tensors)


def state_of_format(predictor: Any, name: str | None) -> dict[str, Tensor]:
    """Return the state_dict of a predictor as another version of the library writes it."""
    state = predictor.state_dict()
    kept = {n: t for n, t in state.items() if n.startswith(("calibration.", "score."))}
    described = {**files.unseal(state["_extra_state"], kept), "format": name}
    return {**state, "_extra_state": files.seal(described, kept)}


def summary(values: Tensor, rank_error: float) -> Compressed:
    """Return a summary of these scores."""
    return filled(Compressed(rank_error), values).shrunk()


def scores_by_group(predictor: Any) -> dict[Any, Tensor]:
    """Return the calibration scores (k, m) of every group, each column sorted."""
    counts = predictor.calibration.groups
    parts = predictor.calibration.scores.split(list(counts.values()))
    return {group: part.sort(dim=0).values for group, part in zip(counts, parts, strict=True)}


def calibration_shares(rows: int, seed: int = 0) -> Tensor:
    """Return the random numbers of the first calibration rows of label sets."""
    return Draws(seed, _CALIBRATION).uniform(torch.arange(rows))[:, 0]


def unrandomised_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break label sets: calibration rows draw no random numbers, new rows do."""
    drawn = Draws.span

    def only_for_prediction(draws: Draws, rows: range, width: int = 1) -> Tensor:
        numbers = drawn(draws, rows, width)
        return torch.ones_like(numbers) if draws.stream == _CALIBRATION else numbers

    monkeypatch.setattr(Draws, "span", only_for_prediction)


def only_label_score(monkeypatch: pytest.MonkeyPatch, rule: Any, most_rows: int) -> None:
    """Restrict the selection of a label score to this rule and number of rows."""
    selection = score_selection.LabelScoreSelection
    monkeypatch.setattr(selection, "_trials", lambda *given: iter([(rule, 1.0)]))
    monkeypatch.setattr(selection, "most_rows", most_rows)


def only_method(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """Make Auto select the method of this name."""
    candidates: dict[str, Any] = {}
    listed = auto.MethodSelection._candidates

    class Biased(comparison.Comparison):
        def trial(self, one: Any, plain: Any) -> Any:
            measured = super().trial(one, plain)
            is_wanted = one is candidates[wanted]
            return comparison.MethodTrial(-1.0, -1.0) if is_wanted else measured

        def is_clearly_better(self, *given: Any) -> bool:
            return True

    def recorded(self: Any, *args: Any) -> Iterator[tuple[str, Any]]:
        for name, one in listed(self, *args):
            candidates[name] = one
            yield name, one

    monkeypatch.setattr(auto, "Comparison", Biased)
    monkeypatch.setattr(auto.MethodSelection, "_candidates", recorded)


def few_epochs(monkeypatch: pytest.MonkeyPatch, epochs: int = 3) -> None:
    """Limit the epochs and boosting rounds of learned scores."""
    monkeypatch.setattr(network, "_EPOCHS", epochs)
    monkeypatch.setattr(boosting, "_MOST_ROUNDS", 2 * epochs)
    monkeypatch.setattr(boosting, "_PATIENCE", epochs)


def few_rows_teach(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Limit the number of training rows that ``fit`` uses."""
    monkeypatch.setattr(training_rows, "MOST_ROWS", rows)


def few_rows_tune(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Limit the number of rows that tune a label score."""
    monkeypatch.setattr(scores._Tuning, "most_rows", rows)
