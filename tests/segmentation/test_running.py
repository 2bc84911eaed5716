"""What pixel sets do with the model: one pass per image, and copies that go on alike."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ffcp.segmentation import DoubleLog, PixelSets
from tests.rows import counted_rows
from tests.segmentation.material import IGNORE, X, Y, holed, network

GROUPS = {"groups": ["day", "night"] * 30}
KINDS = {
    "plain": lambda model, **kw: PixelSets(model, **kw),
    "at a layer": lambda model, **kw: PixelSets(model, "0", ignore=IGNORE, method="exact", **kw),
    "at the input": lambda model, **kw: PixelSets(model, "input", method="exact", **kw),
    "double log": lambda model, **kw: PixelSets(
        model.append(DoubleLog()), outputs="double_log", **kw
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("batch_size", [None, 16])
def test_every_image_goes_through_the_model_once(name: str, batch_size: int | None) -> None:
    # Behind the input lies the whole model, and tangents of fewer inputs than outputs are pushed
    # through it forward: two passes more, of all tangents at once.
    passes = 3 if name == "at the input" else 1
    model = network()
    predictor = KINDS[name](model, batch_size=batch_size)
    checks = []  # whether the model treats images separately, on a few of them
    for images in (30, 60):
        with counted_rows(model) as count:
            predictor.calibrate(X[:images], Y[:images])
        checks.append(count.rows - passes * images)
    assert checks[0] == checks[1] <= 5 * 4
    for share in (None, 0.9):
        with counted_rows(model) as count:
            predictor.predict_set(X[:20], 0.2, share=share)
        assert count.rows == passes * 20


@pytest.mark.parametrize("feature", ["0", "input"])
def test_finding_out_what_an_output_sees_costs_the_same_for_many_images(feature: str) -> None:
    model = network()
    counts = []
    for images in (30, 60):
        with counted_rows(model) as count:
            PixelSets(model, feature).calibrate(X[:images], Y[:images])
        counts.append(count.rows)
    passes = 3 if feature == "input" else 1  # of tangents, as above
    assert counts[1] - counts[0] == passes * 30


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("groups", [{}, GROUPS], ids=["alone", "groups"])
def test_a_copy_predicts_the_same(name: str, groups: dict) -> None:
    predictor = KINDS[name](network()).calibrate(X, holed(Y) if "layer" in name else Y, **groups)
    expected = predictor.predict_set(X, 0.2, **groups)
    for other in (copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        sets = other.predict_set(X, 0.2, **groups)
        assert torch.equal(sets.mask, expected.mask)
        assert torch.equal(sets.prediction, expected.prediction)
        other.calibrate(X, Y, update=True, **groups)
        assert (len(other.calibration), len(predictor.calibration)) == (120, 60)


def test_merging_a_predictor_without_calibration() -> None:
    empty, other = PixelSets(network()), PixelSets(network())
    with pytest.raises(ValueError, match="calibrate"):
        empty.merge(other)
    empty.calibrate(X, Y)
    with pytest.raises(ValueError, match="calibrate"):
        empty.merge(other)
    assert len(empty.calibration) == 60
