"""Training of the small classifier of digits, which needs no file."""

from __future__ import annotations

from torch import nn

from ffcp_paper.data import images
from ffcp_paper.data.images import Digits
from ffcp_paper.networks import convnets
from ffcp_paper.training.regression import train


def train_digits(seed: int = 0, epochs: int = 15) -> tuple[nn.Sequential, Digits]:
    """Train the small network on scikit-learn's digits, which takes seconds and needs no file.

    Network, split and order of training depend on ``seed`` alone.

    Returns
    -------
    model
        The trained network, with a ``feature`` and a ``head``, in eval mode.
    data
        The digits it was trained on, and those for calibration and test.

    Examples
    --------
    >>> from ffcp_paper.networks.pretrained import topk_accuracy
    >>> model, data = train_digits(epochs=3)
    >>> topk_accuracy(model(data.x_test), data.y_test) > 80
    True
    """
    data = images.digits(seed)
    model = convnets.digits_network(seed)
    train(
        model, data.x_train, data.y_train, epochs=epochs, loss=nn.functional.cross_entropy,
        learning_rate=3e-3, seed=seed,
    )  # fmt: skip
    return model, data
