"""One logit for two classes, models that return dicts, and rows that come from a Dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ffcp
from ffcp.network.forward import as_logits

X = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
Z = X[:, 0] + 0.5 * torch.randn(400, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flat", [False, True])
def test_label_shift_is_learned_from_one_logit(flat: bool) -> None:
    def ratios(model: nn.Module) -> list[float]:
        shift = ffcp.calibrations.LabelShift()
        predictor = ffcp.LAC(model, calibration=shift, seed=0)
        predictor.calibrate(X, (Z > 0).long(), new=X[:, :4] + 1)
        return [round(ratio, 6) for ratio in predictor.calibration.ratios]

    one = OneLogit(flat)
    assert ratios(one) == ratios(TwoLogits(one))


class OneLogit(nn.Module):
    """A binary classifier as most are written: one logit, (n, 1) or (n,)."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(x) + 2 * x[:, :1]
        return z[:, 0] if self.flat else z


class TwoLogits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return as_logits(self.inner(x))


def test_the_label_score_is_chosen_for_one_logit_too() -> None:
    labels = (Z > 0).long()
    masks = []
    for model in (OneLogit(True), TwoLogits(OneLogit(True))):
        sets = ffcp.SetPredictor(model, "auto", seed=0).calibrate(X[:300], labels[:300])
        masks.append(sets.predict_set(X[300:], first_row=0).mask)
    assert torch.equal(*masks)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", ["LAC", "APS", "RAPS", "FFRAPS"])
def test_one_logit_gives_the_sets_of_two(name: str, flat: bool) -> None:
    model, labels = OneLogit(flat), (Z > 0).long()
    options: dict[str, Any] = {"seed": 0}
    if name == "FFRAPS":
        options |= {"feature": "body.0", "gradient": "feature"}
    one = getattr(ffcp, name)(model, **options).calibrate(X[:300], labels[:300])
    if name == "FFRAPS":
        options["feature"] = "inner.body.0"
    two = getattr(ffcp, name)(TwoLogits(model), **options).calibrate(X[:300], labels[:300])
    for rows in (X[300:], X[300:301]):
        mine = one.predict_set(rows, first_row=0).mask
        assert torch.equal(mine, two.predict_set(rows, first_row=0).mask)
        assert mine.shape == (len(rows), 2)
    assert one.classes == 2
    assert torch.equal(
        one.score(X[300:], labels[300:], first_row=0), two.score(X[300:], labels[300:], first_row=0)
    )


def test_a_file_of_a_binary_classifier_is_loaded(tmp_path: Any) -> None:
    model, labels = OneLogit(False), (Z > 0).long()
    sets = ffcp.LAC(model).calibrate(X, labels)
    sets.save(tmp_path / "sets.safetensors")
    again = ffcp.load(tmp_path / "sets.safetensors", model)
    assert torch.equal(again.predict_set(X).mask, sets.predict_set(X).mask)


@pytest.mark.usefixtures("torch_that_exports")
def test_an_exported_binary_classifier_has_the_same_sets(tmp_path: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    sets = ffcp.LAC(OneLogit(False)).calibrate(X, (Z > 0).long())
    sets.export(tmp_path / "sets.onnx", X[:50])
    session = runtime.InferenceSession(tmp_path / "sets.onnx")
    names = [output.name for output in session.get_outputs()]
    values = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    assert np.array_equal(values[names.index("mask")], sets.predict_set(X).mask.numpy())


def test_one_logit_in_scikit_learn() -> None:
    sklearn = pytest.importorskip("ffcp.sklearn")
    words = np.array(["no", "yes"])[(Z > 0).long().numpy()]
    make = lambda inputs: nn.Linear(inputs, 1)  # noqa: E731
    sets = sklearn.ConformalClassifier(make, method="lac", random_state=0).fit(X.numpy(), words)
    assert sets.predict_proba(X.numpy()).shape == (400, 2)
    assert (sets.predict(X.numpy()) == words).mean() > 0.7


# -- dicts -------------------------------------------------------------------------------------


class Returns(nn.Module):
    """A model of dicts: ``extra`` are further tensors beside its logits."""

    def __init__(self, key: str, extra: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.head, self.key, self.extra = nn.Linear(4, 3), key, extra

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(x)
        return {**{name: x for name in self.extra}, self.key: logits, "note": "no tensor"}


@pytest.mark.parametrize(("key", "extra"), [("logits", ("hidden",)), ("anything", ())])
def test_logits_or_the_only_tensor_of_a_dict_are_the_prediction(key: str, extra: Any) -> None:
    model, labels = Returns(key, extra), torch.randint(0, 3, (400,))
    sets = ffcp.LAC(model).calibrate(X, labels)
    named = ffcp.LAC(model, output=key).calibrate(X, labels)
    assert torch.equal(sets.predict_set(X).mask, named.predict_set(X).mask)


def test_two_tensors_without_logits_are_refused() -> None:
    with pytest.raises(TypeError, match="output="):
        ffcp.CP(Returns("mean", ("hidden",))).calibrate(X, Z)


class Rows(Dataset[Any]):
    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return 400

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": X[row], "labels": self.labels[row], "text": f"row {row}"}


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: DataLoader(rows, 64)])
def test_datasets_and_loaders_of_dicts_with_labels_are_taken(wrap: Any) -> None:
    model, labels = Returns("logits"), torch.randint(0, 3, (400,))
    from_arrays = ffcp.LAC(model).calibrate(X, labels)
    from_rows = ffcp.LAC(model).calibrate(wrap(Rows(labels)))
    assert torch.equal(from_rows.calibration.scores, from_arrays.calibration.scores)
    mask = from_rows.predict_set(wrap(Rows(labels))).mask
    assert torch.equal(mask, from_arrays.predict_set(X).mask)


def test_a_dataset_of_pairs_is_taken() -> None:
    model = nn.Linear(4, 1)
    rows = TensorDataset(X, Z)
    assert torch.equal(
        ffcp.CP(model).calibrate(rows).predict_interval(rows).lower,
        ffcp.CP(model).calibrate(X, Z).predict_interval(X).lower,
    )


def test_a_hugging_face_model_and_dataset_are_taken_as_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(0, 50, (60, 7))
    data = datasets.Dataset.from_dict(
        {
            "text": ["a text"] * 60,
            "input_ids": ids.tolist(),
            "attention_mask": torch.ones_like(ids).tolist(),
            "label": torch.randint(0, 3, (60,)).tolist(),
        }
    )
    sets = ffcp.RAPS(model, seed=0).calibrate(data)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert len(sets.calibration) > 30
    mask = sets.predict_set(data, first_row=0).mask
    assert torch.equal(mask, sets.predict_set(inputs, first_row=0).mask)
