"""Sources of predictions: torch networks, and any other estimators."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from torch import Tensor, nn

from ffcp.batch import Requires
from ffcp.network import forward
from ffcp.network.arrays import numbers
from ffcp.network.stored import Stored
from ffcp.sklearn.rows import Array, NumericColumns, row_count, take

_EPOCHS, _PATIENCE, _BATCH = 200, 20, 64


def is_fitted_already(estimator: Any) -> bool:
    """Whether an estimator is not to be fitted: a network, or a frozen estimator."""
    return isinstance(estimator, (nn.Module, FrozenEstimator))


def known_classes(estimator: Any, x: Any, labels: Array) -> Array:
    """Return the classes of a fitted estimator, in the order of its outputs."""
    if hasattr(estimator, "classes_"):
        return np.asarray(estimator.classes_)
    outputs = _outputs(estimator, x)
    present = np.unique(labels)
    if present.dtype.kind in "iu" and present[0] >= 0 and present[-1] < outputs:
        return np.arange(outputs)
    if len(present) != outputs:
        sizes = f"{outputs} outputs and calibration rows {len(present)} labels"
        raise ValueError(f"the network has {sizes}: set its attribute 'classes_', an array")
    return present


class NetworkSource:
    """A torch network, which has layers and gradients, so every method supports it."""

    def __init__(self, network: nn.Module, classify: bool) -> None:
        self.model, self._requires = network, Requires(logits=classify)

    @staticmethod
    def array(x: Any) -> Array:
        """Return X in float32; raise if it has strings."""
        values = numbers(x if hasattr(x, "columns") else np.asarray(x), "X")
        return np.ascontiguousarray(values, dtype=np.float32)

    def inputs(self, x: Any) -> Tensor:
        """Return the input of the predictor."""
        return torch.from_numpy(self.array(x))

    def outputs(self, x: Any) -> Array:
        """Return the network's outputs: numbers (n,), or logits (n, K)."""
        outs = forward.run_batches(self.model, self.inputs(x), self._requires)
        result = torch.cat([out.output for out in outs])
        return result.double().cpu().numpy()


class StoredWithFeatures(nn.Module):
    """A model whose precomputed predictions are the first column of its input.

    The other columns are the features, from which a method can learn its errors. There is no
    gradient.

    >>> StoredWithFeatures()(torch.tensor([[7.0, 1.0, 2.0]]))
    tensor([7.])
    """

    rows_at_once = Stored.rows_at_once

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions."""
        return x[:, 0].detach()


class StoredSource:
    """An estimator without gradients, of which only predictions and inputs are known."""

    def __init__(self, estimator: Any, classes: Array | None, columns: NumericColumns) -> None:
        self.estimator, self.classes, self.columns = estimator, classes, columns
        self.model: nn.Module = StoredWithFeatures() if classes is None else Stored()

    def inputs(self, x: Any) -> Tensor:
        """Return the input of the predictor: predictions, and for regression the features."""
        result = self.outputs(x)
        if self.classes is None:
            result = np.column_stack([result, self.columns(x)])
        return torch.from_numpy(result)

    def outputs(self, x: Any) -> Array:
        """Return the estimator's predictions (n,), or the logarithms of probabilities (n, K)."""
        if self.classes is None:
            return np.asarray(self.estimator.predict(x), dtype=np.float64).reshape(row_count(x))
        shares = np.asarray(self.estimator.predict_proba(x), dtype=np.float64)
        return np.log(np.clip(shares, 1e-12, None))


Source = NetworkSource | StoredSource


def source(estimator: Any, x: Any, y: Array, classes: Array | None, seed: int) -> Source:
    """Return the source of an estimator, fitted on training rows unless it is fitted already.

    Parameters
    ----------
    estimator : estimator, nn.Module or callable
        A trained network, a skorch network, a function from a number of inputs to a network, or
        any estimator of scikit-learn, which is passed X unchanged.
    x : array-like, frame, tuple, dict or loader
    y : array
        The training rows, ``y`` as class numbers; for a fitted estimator the calibration rows.
    """
    classify = classes is not None
    if isinstance(estimator, nn.Module):
        return NetworkSource(estimator, classify)
    if not hasattr(estimator, "fit"):
        network = estimator(NetworkSource.array(x).shape[1]) if callable(estimator) else None
        if not isinstance(network, nn.Module):
            raise TypeError(f"'estimator' must be an estimator or a network, got {estimator!r}")
        network = _for_classes(network, x, classes)
        return NetworkSource(_trained(network, x, y, classify, seed), classify)
    if not hasattr(estimator, "predict"):
        name = type(estimator).__name__
        raise TypeError(
            f"{name!r} has no predict: expected a regressor or a classifier, or a Pipeline that "
            "ends with one"
        )
    fitted, is_frozen = clone(estimator), isinstance(estimator, FrozenEstimator)
    if not is_frozen:
        fitted.fit(*_for_estimator(estimator, x, y, classes))
    network = getattr(fitted, "module_", None)
    if isinstance(network, nn.Module):
        return NetworkSource(_for_classes(network, x, classes), classify)
    if classes is not None and not hasattr(fitted, "predict_proba"):
        name = type(estimator).__name__
        raise TypeError(f"{name!r} has no predict_proba: wrap it in CalibratedClassifierCV")
    return StoredSource(fitted, classes, NumericColumns(x, words=not is_frozen))


def _for_estimator(estimator: Any, x: Any, y: Array, classes: Array | None) -> tuple[Any, Array]:
    """Return X and y for the estimator: networks of skorch need float32 and class numbers."""
    if hasattr(estimator, "module") and hasattr(estimator, "initialize"):
        return NetworkSource.array(x), y.astype(np.float32)[:, None] if classes is None else y
    return x, y if classes is None else classes[y]


class FirstOutputs(nn.Module):
    """A network restricted to its first outputs.

    >>> FirstOutputs(nn.Identity(), 2)(torch.tensor([[7.0, 1.0, 2.0]]))
    tensor([[7., 1.]])
    """

    def __init__(self, network: nn.Module, outputs: int) -> None:
        super().__init__()
        self.network, self.outputs = network, outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the first outputs."""
        first: Tensor = self.network(x)[:, : self.outputs]
        return first


def _for_classes(network: nn.Module, x: Any, classes: Array | None) -> nn.Module:
    """Return a network with one output per class, if any; additional outputs are cut off."""
    if classes is None:
        return network
    outputs, count = _outputs(network, x), len(classes)
    if outputs < count:
        raise ValueError(f"the network has {outputs} outputs, expected {count}, one per class")
    return network if outputs == count else FirstOutputs(network, count)


def _outputs(network: nn.Module, x: Any) -> int:
    """Return the number of outputs of a network."""
    outputs = NetworkSource(network, classify=True).outputs(take(x, np.arange(1)))
    return int(outputs.shape[-1])


def _trained(network: nn.Module, x: Any, y: Array, classify: bool, seed: int) -> nn.Module:
    """Return the network after training; a tenth of the rows is used for early stopping."""
    rows = torch.from_numpy(NetworkSource.array(x))
    target = torch.from_numpy(y.astype(np.int64) if classify else y.astype(np.float32))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    stop, train = order.tensor_split([max(1, len(order) // 10)])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def loss(batch: Tensor) -> Tensor:
        outputs = network(rows[batch])
        if classify:
            return nn.functional.cross_entropy(forward.as_logits(outputs), target[batch])
        return nn.functional.mse_loss(outputs.reshape(-1), target[batch])

    best, best_weights, waited = np.inf, network.state_dict(), 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(_EPOCHS):
            network.train()
            for batch in train[torch.randperm(len(train))].split(_BATCH):
                optimizer.zero_grad()
                loss(batch).backward()
                optimizer.step()
            network.eval()
            with torch.no_grad():
                validation = float(loss(stop))
            waited += 1
            if validation < best:
                best, best_weights, waited = validation, copy.deepcopy(network.state_dict()), 0
            if waited > _PATIENCE:
                break
    network.load_state_dict(best_weights)
    return network.eval()
