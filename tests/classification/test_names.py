"""Names of classes: labels are strings, and sets come back as names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ffcp
from tests.conftest import normal

pd = pytest.importorskip("pandas")

NAMES = ["cat", "dog", "fox"]
X = normal(80, 4, seed=0)
Y = X[:, :3].argmax(dim=1)
WORDS = [NAMES[label] for label in Y.tolist()]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    "words",
    [
        WORDS,
        tuple(WORDS),
        np.array(WORDS),
        np.array(WORDS, dtype=object),
        pd.Series(WORDS),
        pd.Series(WORDS, dtype="category"),
        pd.Categorical(WORDS, categories=NAMES[::-1]),
        Y,
        Y.tolist(),
    ],
)
@pytest.mark.parametrize("make", [ffcp.LAC, ffcp.APS, ffcp.RAPS, ffcp.FFRAPS])
def test_labels_may_be_names(make, words) -> None:
    plain = make(model(), seed=0).calibrate(X, Y)
    predictor = make(model(), names=NAMES, seed=0).calibrate(X, words)
    sets, expected = predictor.predict_set(X, first_row=0), plain.predict_set(X, first_row=0)
    assert sets.mask.equal(expected.mask)
    assert sets.labels == [[NAMES[i] for i in row.tolist()] for row in expected.labels]
    assert sets.coverage(words) == expected.coverage(Y)
    own = predictor.score(X, words, first_row=0)
    assert own.equal(plain.score(X, Y, first_row=0))
    assert predictor.classes == 3


def test_sets_of_a_loader_are_names() -> None:
    predictor = ffcp.LAC(model(), names=NAMES).calibrate(
        [(X[:50], WORDS[:50]), (X[50:], WORDS[50:])]
    )
    assert predictor.predict_set(iter(X.split(30))).labels == predictor.predict_set(X).labels


def test_names_are_saved_and_compared(tmp_path) -> None:
    predictor = ffcp.LAC(model(), names=NAMES).calibrate(X, WORDS)
    predictor.save(tmp_path / "saved")
    loaded = ffcp.LAC(model(), names=NAMES).load(tmp_path / "saved")
    assert loaded.predict_set(X).labels == predictor.predict_set(X).labels
    with pytest.raises(ValueError, match="names"):
        ffcp.LAC(model(), names=NAMES[::-1]).load(tmp_path / "saved")


def test_pieces_take_names() -> None:
    predictor = ffcp.SetPredictor(model(), ffcp.scores.LAC(), names=NAMES).calibrate(X, WORDS)
    assert {name for row in predictor(X).labels for name in row} <= set(NAMES)


def test_what_is_wrong_with_names() -> None:
    with pytest.raises(TypeError, match="names"):
        ffcp.LAC(model()).calibrate(X, WORDS)
    with pytest.raises(ValueError, match="bird"):
        ffcp.LAC(model(), names=NAMES).calibrate(X, [*WORDS[:3], "bird", *WORDS[4:]])
    with pytest.raises(ValueError, match="names"):
        ffcp.LAC(model(), names=NAMES[:2]).calibrate(X, Y)
    with pytest.raises(ValueError, match="cat"):
        ffcp.LAC(model(), names=["cat", "dog", "cat"])
    with pytest.raises(TypeError, match=r"\b1\b"):
        ffcp.LAC(model(), names=[1, 2, 3])
    with pytest.raises(TypeError, match="name"):
        ffcp.LAC(model(), names="cat")
