"""Time and memory of prediction sets for 1,000 classes: ``python -m benchmarks.sets``.

The baseline is one full ``torch.sort`` of the logits and one cumulative sum: no softmax, no score,
no set. TorchCP and MAPIE are compared if they are installed, in a separate virtual environment,
since both need many packages:

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install -c constraints.txt torch rich mapie
    /tmp/peers/bin/pip install -c constraints.txt torch_geometric torchvision transformers pandas
    /tmp/peers/bin/pip install --no-deps torchcp
    PYTHONPATH=src /tmp/peers/bin/python -m benchmarks.sets
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import Resident, best_of, show, table, verdict

ROWS, CLASSES = 50_000, 1_000
CALIBRATION = 10_000
PEER_ROWS = 10_000
ALPHA = 0.1


def logits_and_labels(rows: int, *, sharp: bool = True, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits as sharp as those of an ImageNet network, or nearly uninformative ones."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % CLASSES
    logits = torch.randn(rows, CLASSES, generator=generator)
    if sharp:
        logits *= 2
        logits[torch.arange(rows), labels] += 4 + 12 * torch.rand(rows, generator=generator)
    return logits, labels


def bare(logits: Tensor) -> Tensor:
    return logits.sort(dim=1, descending=True).values.cumsum(dim=1)


METHODS: dict[str, Callable[[], ffcp.SetPredictor]] = {
    "LAC": lambda: ffcp.LAC(nn.Identity()),
    "APS": lambda: ffcp.APS(nn.Identity()),
    "RAPS": lambda: ffcp.RAPS(nn.Identity(), lam=0.01, kreg=5),
    "FFRAPS": lambda: ffcp.FFRAPS(nn.Identity(), delta=0.01, lam=0.01, kreg=5),
    "RAPS, each class": lambda: ffcp.RAPS(nn.Identity(), lam=0.01, kreg=5, class_conditional=True),
}


def calibrated(sharp: bool) -> dict[str, ffcp.SetPredictor]:
    data = logits_and_labels(CALIBRATION, sharp=sharp, seed=1)
    return {name: make().calibrate(*data) for name, make in METHODS.items()}


def prediction(*, sharp: bool, rounds: int = 5) -> None:
    logits, labels = logits_and_labels(ROWS, sharp=sharp)
    predictors = calibrated(sharp)
    contestants: dict[str, Callable[[], object]] = {"bare": lambda: bare(logits)}
    for name, predictor in predictors.items():
        contestants[name] = lambda p=predictor: p.predict_set(logits, ALPHA)  # type: ignore[misc]
    contestants["calibrate"] = lambda: METHODS["RAPS"]().calibrate(logits, labels)
    times = best_of(contestants, rounds)
    kind = "sharp" if sharp else "flat"
    report = table(
        f"{ROWS:,} rows x {CLASSES:,} classes, {kind} logits, {torch.get_num_threads()} threads",
        "what", "ms", "mean size", "of sort + cumsum", "limit", "",
    )  # fmt: skip
    for name in contestants:
        ratio = times[name] / times["bare"]
        limited = name in ("RAPS", "FFRAPS")
        size = ""
        if name in predictors:
            size = f"{ffcp.metrics.mean_set_size(predictors[name].predict_set(logits, ALPHA)):.1f}"
        report.add_row(
            {"bare": "torch.sort + cumsum", "calibrate": "RAPS, calibrate"}.get(name, name),
            f"{times[name] * 1e3:.0f}", size, f"{ratio:.2f}",
            *(("1.30", verdict(ratio, 1.3)) if limited else ()),
        )  # fmt: skip
    show(report)


def _predicted(name: str, answer: multiprocessing.Queue[float]) -> None:
    """Measure in a separate process, so that other jobs' memory is not counted."""
    predictor = METHODS[name]().calibrate(*logits_and_labels(CALIBRATION, seed=1))
    logits, _ = logits_and_labels(ROWS)
    predictor.predict_set(logits[:5000], ALPHA)
    with Resident() as resident:
        predictor.predict_set(logits, ALPHA)
    answer.put(resident.grown)


def memory() -> None:
    report = table(
        f"Memory beside {ROWS * CLASSES * 4 / 2**20:.0f} MB of logits; the mask itself has "
        f"{ROWS * CLASSES / 2**20:.0f} MB",
        "what", "MB more", "limit", "",
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    for name in ("RAPS", "FFRAPS", "RAPS, each class"):
        answer = context.Queue()
        process = context.Process(target=_predicted, args=(name, answer))
        process.start()
        grown = answer.get()
        process.join()
        report.add_row(name, f"{grown:.0f}", "80", verdict(grown, 80))
    show(report)


class Probabilities:
    """A fitted scikit-learn classifier, as far as MAPIE looks: logits in, probabilities out."""

    _estimator_type = "classifier"

    def __init__(self) -> None:
        self.classes_ = np.arange(CLASSES)
        self.n_features_in_ = CLASSES

    def fit(self, x: Any, y: Any) -> Probabilities:
        return self

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        result: np.ndarray = torch.from_numpy(x).softmax(dim=1).double().numpy()
        return result

    def predict(self, x: np.ndarray) -> np.ndarray:
        result: np.ndarray = x.argmax(axis=1)
        return result

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = importlib.import_module("sklearn.utils")
        return tags.Tags(
            estimator_type="classifier",
            target_tags=tags.TargetTags(required=True),
            classifier_tags=tags.ClassifierTags(),
        )


def torchcp_raps(x: Tensor, y: Tensor) -> Callable[[Tensor], object]:
    if importlib.util.find_spec("torchsort") is None:
        # TorchCP imports it for a training loss; it has to be compiled and RAPS has no use for it.
        stub = types.ModuleType("torchsort")
        stub.__dict__.update(soft_rank=None, soft_sort=None)
        sys.modules["torchsort"] = stub
    predictors = importlib.import_module("torchcp.classification.predictor")
    scores = importlib.import_module("torchcp.classification.score")
    peer = predictors.SplitPredictor(
        scores.RAPS(penalty=0.01, kreg=5), nn.Identity(), alpha=ALPHA, device=torch.device("cpu")
    )
    peer.calculate_threshold(x, y, ALPHA)
    return lambda new: peer.predict(new)


def mapie_raps(x: Tensor, y: Tensor) -> Callable[[Tensor], object]:
    module = importlib.import_module("mapie.classification")
    peer = module.SplitConformalClassifier(
        Probabilities(), confidence_level=1 - ALPHA, conformity_score="raps", random_state=0
    ).conformalize(x.numpy(), y.numpy())
    return lambda new: peer.predict_set(new.numpy())


def peers(rounds: int = 2) -> None:
    data = logits_and_labels(CALIBRATION, seed=1)
    logits, _ = logits_and_labels(PEER_ROWS)
    ours = METHODS["RAPS"]().calibrate(*data)
    report = table(
        f"RAPS of {PEER_ROWS:,} rows x {CLASSES:,} classes", "library", "ms", "of ours", ""
    )
    for name, prepare in (("TorchCP", torchcp_raps), ("MAPIE", mapie_raps)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                predict = prepare(*data)
        except ImportError as error:
            report.add_row(name, "", "", f"not installed ({error}): see the head of this file")
            continue
        times = best_of(
            {
                "ours": lambda: ours.predict_set(logits, ALPHA),
                "peer": lambda predict=predict: predict(logits),  # type: ignore[misc]
            },
            rounds,
        )
        ratio = times["peer"] / times["ours"]
        report.add_row("ffcp", f"{times['ours'] * 1e3:.0f}")
        verdict = "at least 3 times" if ratio >= 3 else "LESS than 3 times"
        report.add_row(name, f"{times['peer'] * 1e3:.0f}", f"{ratio:.1f}", verdict)
    show(report)


def main() -> None:
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    prediction(sharp=True)
    prediction(sharp=False, rounds=2)
    memory()
    peers()


if __name__ == "__main__":
    main()
