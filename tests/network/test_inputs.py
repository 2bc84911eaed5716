"""Rows in: what people really have becomes tensors of the model's type, or is refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.network import inputs
from tests.conftest import normal, small_mlp

pd = pytest.importorskip("pandas")

X, Y = normal(40, 4, seed=0), normal(40, seed=1)
WHOLE = (10 * X).round()  # numbers that integers hold


def band(x: object, x_cal: object = WHOLE, dtype: torch.dtype = torch.float32) -> Tensor:
    predictor = ffcp.FFCP(small_mlp().to(dtype), "0").calibrate(x_cal, Y)
    return predictor.predict_interval(x).upper


NUMBERS = WHOLE.numpy()
SAME = {
    "integers": NUMBERS.astype(np.int64),
    "small integers": NUMBERS.astype(np.int16),
    "lists": NUMBERS.astype(int).tolist(),
    "numbers of numpy in lists": [list(row) for row in NUMBERS],
    "tuples in a list": [tuple(row) for row in NUMBERS.astype(int).tolist()],
    "float64": NUMBERS.astype(np.float64),
    "half": NUMBERS.astype(np.float16),
    "long double": NUMBERS.astype(np.longdouble),
    "big-endian": NUMBERS.astype(">f8"),
    "big-endian integers": NUMBERS.astype(">i4"),
    "negative strides": NUMBERS[::-1].copy()[::-1],
    "columns first": np.asfortranarray(NUMBERS),
    "float64 tensor": WHOLE.double(),
    "half tensor": WHOLE.half(),
    "frame": pd.DataFrame(NUMBERS, columns=list("abcd")),
    "frame of integers": pd.DataFrame(NUMBERS.astype(int)),
    "nullable frame": pd.DataFrame(NUMBERS.astype(int)).astype("Int64"),
    "mixed frame": pd.DataFrame(NUMBERS).astype({0: "Int16", 1: "Float32", 2: "int8"}),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_same_numbers_give_the_same_band(kind: str, dtype: torch.dtype) -> None:
    expected = band(WHOLE.to(dtype), WHOLE.to(dtype), dtype)
    assert expected.dtype == dtype
    assert band(SAME[kind], WHOLE, dtype).equal(expected)
    assert band(WHOLE, SAME[kind], dtype).equal(expected)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64", "bool"])
def test_unsigned_and_boolean_arrays(kind: str) -> None:
    x = (NUMBERS > 0).astype(kind)
    assert inputs.to_tensors(x, nn.Linear(4, 1)).equal((WHOLE > 0).float())


def test_boolean_columns() -> None:
    frame = pd.DataFrame({"a": [True, False], "b": [1.5, 2.5]})
    expected = torch.tensor([[1.0, 1.5], [0.0, 2.5]])
    assert inputs.to_tensors(frame, nn.Linear(2, 1)).equal(expected)
    assert inputs.to_tensors(frame.astype({"a": "boolean"}), nn.Linear(2, 1)).equal(expected)


def test_a_missing_number_in_a_nullable_column_is_named() -> None:
    frame = SAME["nullable frame"].copy()
    frame.iloc[7, 1] = pd.NA
    with pytest.raises(ValueError, match="row 7"):
        ffcp.CP(small_mlp()).calibrate(frame, Y)


@pytest.mark.parametrize("y", [pd.Series(Y.numpy()), pd.DataFrame({"y": Y.numpy()})])
def test_targets_from_pandas(y: object) -> None:
    expected = ffcp.CP(small_mlp()).calibrate(X, Y).calibration.scores
    assert ffcp.CP(small_mlp()).calibrate(X, y).calibration.scores.equal(expected)


@pytest.mark.parametrize(
    "y",
    [
        pd.Series(range(40), dtype="Int64"),
        np.arange(40, dtype=">i8"),
        np.arange(40, dtype=np.longdouble),
        list(range(40)),
        np.arange(40)[::-1].copy()[::-1],
    ],
)
def test_targets_of_odd_types(y: object) -> None:
    expected = ffcp.CP(small_mlp()).calibrate(X, torch.arange(40)).calibration.scores
    assert ffcp.CP(small_mlp()).calibrate(X, y).calibration.scores.equal(expected)


# -- the model's type ---------------------------------------------------------------------------


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_without_parameters_keeps_float64() -> None:
    # Near 1e5 the steps of float32 are 0.0078 apart.
    rng = np.random.default_rng(0)
    x = 1e5 + rng.normal(size=200)
    y = x + rng.uniform(-0.001, 0.001, size=200)
    made = ffcp.CP(Same()).calibrate(x, y).predict_interval(x)
    assert made.upper.dtype == torch.float64
    assert float((made.upper - made.lower).max()) < 0.0021
    assert inputs.to_tensors([[1, 2]], Same()).dtype == torch.float64
    assert inputs.to_tensors(x.astype(np.float32), Same()).dtype == torch.float32


def test_integers_stay_integers_for_an_embedding() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1))
    x = torch.randint(0, 5, (40, 2))
    expected = ffcp.FFCP(model, "0").calibrate(x, Y).predict_interval(x).upper
    for given in (x.numpy(), x.int(), x.tolist(), pd.DataFrame(x.numpy()).astype("Int64")):
        assert ffcp.FFCP(model, "0").calibrate(given, Y).predict_interval(x).upper.equal(expected)
    assert inputs.to_tensors(x.numpy().astype(np.uint16), model).dtype == torch.int64


def test_integer_and_boolean_tensors_are_left_alone() -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool):
        assert inputs.to_tensors(torch.ones(3, dtype=dtype), nn.Linear(1, 1)).dtype == dtype


def test_a_mask_beside_the_numbers_stays_one() -> None:
    x = inputs.to_tensors({"x": np.ones((3, 2)), "mask": np.ones(3, bool)}, nn.Linear(2, 1))
    assert x["x"].dtype == torch.float32
    assert x["mask"].dtype == torch.bool


def test_a_tensor_of_one_of_several_types_of_the_model_is_left_alone() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1).double()])
    assert inputs.to_tensors(torch.ones(1, 2).double(), model).dtype == torch.float64
    assert inputs.to_tensors(torch.ones(1, 2).half(), model).dtype == torch.float32


def test_the_caller_s_array_is_neither_changed_nor_held() -> None:
    x, y = NUMBERS.copy(), Y.numpy().copy()
    x.flags.writeable = False
    predictor = ffcp.CP(small_mlp()).calibrate(x, y)
    before = predictor.calibration.scores.clone()
    y[:] = 0
    assert predictor.calibration.scores.equal(before)


# -- refused ------------------------------------------------------------------------------------

REFUSED = {
    "masked": (np.ma.masked_array(NUMBERS, NUMBERS > 5), "masked"),
    "complex array": (NUMBERS + 1j, "complex64"),
    "complex": (X + 1j, "complex64"),
    "sparse": (X.to_sparse(), "sparse_coo"),
    "strings": (np.full((40, 4), "a"), "<U1"),
    "objects": (np.full((40, 4), None), "object"),
    "dates": (np.zeros((40, 4), "M8[s]"), "datetime64"),
    "string column": (
        pd.DataFrame({"age": [1.0] * 40, "name": ["3"] * 40}),
        "'name'",
    ),
    "object column": (
        pd.DataFrame({"age": pd.Series([1.0] * 40, dtype=object)}),
        "'age'",
    ),
    "categories": (
        pd.DataFrame({"c": pd.Categorical(["a"] * 40)}),
        "category",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_words(kind: str) -> None:
    x, message = REFUSED[kind]
    for call in (
        lambda: ffcp.CP(small_mlp()).calibrate(x, Y),
        lambda: ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(x),
        lambda: ffcp.gradient_norms(small_mlp(), x, ["input"]),
    ):
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.parametrize(
    "y", [np.ma.masked_array(Y.numpy(), Y.numpy() > 0), Y + 1j, Y.to_sparse(), ["a"] * 40]
)
def test_refused_targets(y: object) -> None:
    with pytest.raises(TypeError, match=r"^y "):
        ffcp.CP(small_mlp()).calibrate(X, y)


def test_columns_of_the_same_name() -> None:
    with pytest.raises(ValueError, match="'a'"):
        ffcp.CP(small_mlp()).calibrate(pd.DataFrame(NUMBERS, columns=list("aabc")), Y)


def test_a_ragged_list() -> None:
    with pytest.raises(ValueError, match="lengths"):
        ffcp.CP(small_mlp()).calibrate([[1.0, 2.0, 3.0, 4.0], [1.0]], Y[:2])


# -- frames, dicts and single rows --------------------------------------------------------------

FRAME = pd.DataFrame(X.numpy(), columns=["age", "size", "rooms", "floor"])
TURNED = FRAME[["floor", "age", "rooms", "size"]]


def test_columns_in_another_order_are_put_in_order(tmp_path) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(FRAME, Y)
    expected = predictor.predict_interval(X).upper
    assert predictor.predict_interval(TURNED).upper.equal(expected)
    assert predictor.score(TURNED, Y).equal(predictor.score(X, Y))
    before = predictor.calibration.scores.clone()
    predictor.calibrate(TURNED, Y, update=True)
    assert predictor.calibration.scores.equal(before.repeat_interleave(2, dim=0))
    predictor.save(tmp_path / "saved")
    loaded = ffcp.CP(small_mlp()).load(tmp_path / "saved")
    assert loaded.predict_interval(TURNED).prediction.equal(
        predictor.predict_interval(X).prediction
    )


def test_a_new_calibration_has_columns_of_its_own() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(FRAME, Y).calibrate(TURNED, Y)
    turned = TURNED.to_numpy()
    assert predictor.predict_interval(FRAME).upper.equal(predictor.predict_interval(turned).upper)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (FRAME.rename(columns={"age": "years"}), "'age'.*'years'"),
        (FRAME.drop(columns="size"), "'size'"),
        (FRAME.assign(more=1), "'more'"),
    ],
)
def test_other_columns_are_refused(frame: object, message: str) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(FRAME, Y)
    with pytest.raises(ValueError, match=message):
        predictor.predict_interval(frame)


def test_workers_with_other_columns_do_not_merge() -> None:
    model = small_mlp()
    with pytest.raises(ValueError, match="columns"):
        ffcp.CP(model).calibrate(FRAME, Y).merge(ffcp.CP(model).calibrate(TURNED, Y))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a) + b


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"a": X, "b": Y, "c": Y}, "'c'"),
        ({"a": X}, "'b'"),
        ({"a": X, "d": Y}, "'d'.*'b'"),
    ],
)
def test_a_dict_with_other_keys_names_them(x: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ffcp.CP(Two()).calibrate(x, Y)


def test_an_extra_key_for_a_model_of_one_argument() -> None:
    with pytest.raises(TypeError, match="mask"):
        ffcp.CP(nn.Linear(4, 1)).calibrate({"input": X, "mask": Y}, Y)


def test_a_single_row() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    for row in (X[0], X[0].numpy(), X[0].tolist()):
        with pytest.raises(ValueError, match=r"x\[None\]"):
            predictor.predict_interval(row)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        ffcp.gradient_norms(small_mlp(), X[0], ["0"])
    with pytest.raises(ValueError, match=r"x\[None\]"):
        ffcp.CP(small_mlp()).calibrate(X[:, 0], Y)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        ffcp.CP(small_mlp()).calibrate(X[0], Y[:1])


# -- loaders ------------------------------------------------------------------------------------


class Plain(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> Tensor:
        return X[row]


def loaders() -> dict[str, object]:
    load, data = torch.utils.data.DataLoader, torch.utils.data.TensorDataset
    return {
        "of x": load(Plain(), batch_size=7),
        "of [x]": load(data(X), batch_size=7),
        "of pairs": load(data(X, Y), batch_size=7),
        "generator": (part.numpy() for part in X.split(9)),
        "of frames": (FRAME.iloc[i : i + 9] for i in range(0, 40, 9)),
    }


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize(
    "make",
    [
        ffcp.CP,
        lambda m: ffcp.FFCP(m, "0"),
        lambda m: ffcp.LCP(
            m, ffcp.kernels.Localizer("gaussian", bandwidth=1.0), guarantee="random"
        ),
    ],
)
def test_bands_of_a_loader(make, kind: str) -> None:
    predictor = make(small_mlp()).calibrate(X, Y)
    expected = predictor.predict_interval(X, alpha=0.3, first_row=0)
    made = predictor.predict_interval(loaders()[kind], alpha=0.3, first_row=0)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_scores_of_a_loader() -> None:
    for predictor in (ffcp.CP(small_mlp()), ffcp.CP(small_mlp(outputs=2))):
        y = Y if predictor.model[-1].out_features == 1 else X[:, :2]
        loader = [(X[:25], y[:25]), (X[25:], y[25:])]
        torch.testing.assert_close(predictor.score(loader), predictor.score(X, y))
    with pytest.raises(TypeError, match="score"):
        predictor.score(X)
    with pytest.raises(ValueError, match="rows"):
        predictor.score([])


def test_an_empty_loader() -> None:
    with pytest.raises(ValueError, match="rows"):
        ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(iter([]))


def test_groups_of_a_loader() -> None:
    groups = ["a", "b"] * 20
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=groups)
    expected = predictor.predict_interval(X, 0.3, groups=groups).upper
    assert predictor.predict_interval(iter(X.split(9)), 0.3, groups=groups).upper.equal(expected)
    for wrong in (groups[:-1], [*groups, "a"]):
        with pytest.raises(ValueError, match="groups"):
            predictor.predict_interval(iter(X.split(9)), 0.3, groups=wrong)


class Optional(Two):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.layer(a)


def test_pairs_are_inputs_of_a_model_of_two_arguments_and_refused_where_nobody_knows() -> None:
    column = Y[:, None]
    two = ffcp.CP(Two()).calibrate((X, column), Y)
    expected = two.predict_interval((X, column)).upper
    assert two.predict_interval(iter([(X, column)])).upper.equal(expected)
    assert two.predict_interval(iter([((X, column), Y)])).upper.equal(expected)
    with pytest.raises(TypeError, match="pairs"):
        ffcp.CP(Optional()).calibrate(X, Y).predict_interval(iter([(X, Y)]))


class Repeats(torch.utils.data.IterableDataset):
    def __init__(self, divided: bool) -> None:
        self.divided = divided

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        step = (worker.id, None, worker.num_workers) if self.divided and worker else (0, None, 1)
        rows = slice(*step)
        return zip(X[rows], Y[rows], strict=True)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_rows_that_every_worker_repeats_are_noticed(workers: int) -> None:
    def loader(divided: bool) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(Repeats(divided), batch_size=8, num_workers=workers)

    assert len(ffcp.CP(small_mlp()).calibrate(loader(True)).calibration) == 40
    if workers < 2:
        assert len(ffcp.CP(small_mlp()).calibrate(loader(False)).calibration) == 40
        return
    with pytest.raises(ValueError, match="batch 1"):
        ffcp.CP(small_mlp()).calibrate(loader(False))


# -- predictor(x) -------------------------------------------------------------------------------


def test_calling_a_predictor_gives_its_band() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    assert predictor(X).upper.equal(predictor.predict_interval(X, 0.1).upper)
    assert predictor(X, alpha=0.3).upper.equal(predictor.predict_interval(X, 0.3).upper)


def test_its_warning_points_at_the_caller() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:5], Y[:5])
    for ask in (predictor, predictor.predict_interval, nn.Sequential(predictor)):
        with pytest.warns(ffcp.FFCPWarning) as caught:
            ask(X)
        assert caught[0].filename == __file__


class NumberAndClass(nn.Module):
    """Takes numbers and the index of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.kind = nn.Linear(4, 1), nn.Embedding(5, 1)

    def forward(self, number: Tensor, kind: Tensor) -> Tensor:
        return self.number(number) + self.kind(kind)


def test_lists_and_foreign_arrays_inside_a_dict_are_read() -> None:
    model, x = NumberAndClass(), normal(40, 4, seed=0)
    kind, y = np.arange(40) % 5, normal(40, seed=1)
    predictor = ffcp.CP(model).calibrate({"number": x, "kind": kind}, y)
    want = predictor({"number": x[:5], "kind": torch.arange(5)}).upper
    for number, index in [
        (x[:5].numpy().astype(">f8"), kind[:5].astype(">i4")),
        (x[:5].tolist(), [0, 1, 2, 3, 4]),
        (x[:5].numpy()[::-1][::-1], kind[:5].astype(np.int16)),
    ]:
        torch.testing.assert_close(predictor({"number": number, "kind": index}).upper, want)


KIND = torch.arange(40) % 5


@pytest.mark.parametrize(
    ("model", "x", "advice"),
    [
        (nn.Linear(4, 1), WHOLE.long(), r"x.to\(torch.float32\)"),
        (nn.Linear(4, 1).double(), WHOLE > 0, r"x.to\(torch.float64\)"),
        (nn.BatchNorm1d(4), WHOLE.int(), r"x.to\(torch.float32\)"),
        (nn.Conv1d(1, 1, 4), WHOLE.long()[:, None], r"x.to\(torch.float32\)"),
        (NumberAndClass(), (WHOLE.long(), KIND), r"x\[0\].to\(torch.float32\) or x\[1\]"),
        (NumberAndClass(), {"number": X, "kind": KIND.float()}, r"or x\[kind\].long\(\)$"),
    ],
)
def test_a_tensor_of_another_type_than_the_models_is_refused_with_advice(model, x, advice):
    with pytest.raises(ValueError, match=advice) as refused:
        ffcp.CP(model).calibrate(x, Y)
    assert isinstance(refused.value.__cause__, RuntimeError)  # torch's own words are kept


def test_errors_of_a_model_that_are_not_of_types_stay_what_they_are():
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no connection")

    with pytest.raises(RuntimeError, match=r"^no connection$"):
        ffcp.CP(Fails(4, 1)).calibrate(WHOLE.long(), Y)
    with pytest.raises(RuntimeError, match=r"must have the same dtype, but got Float and Double$"):
        # Types are at odds inside the model, and no other input would help.
        ffcp.CP(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1).double())).calibrate(X, Y)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.empty(40, 4, device="meta"), "meta"),
        ([row for row in normal(40, 4, seed=0)], "torch.stack"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(x: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ffcp.CP(nn.Linear(4, 1)).calibrate(x, normal(40, seed=1))


def test_sparse_columns_of_frames_are_read() -> None:
    frame = pd.DataFrame(X.numpy(), columns=list("abcd"))
    predictor = ffcp.CP(nn.Linear(4, 1)).calibrate(frame, normal(40, seed=1))
    dense = predictor(frame[:5]).upper
    sparse = frame.astype(pd.SparseDtype("float32"))
    assert torch.equal(predictor(sparse[:5]).upper, dense)


def test_one_weight_for_all_rows_is_refused() -> None:
    weighted = ffcp.CP(nn.Linear(4, 1), calibration=ffcp.calibrations.Weighted("given"))
    with pytest.raises(ValueError, match="weights"):
        weighted.calibrate(normal(40, 4, seed=0), normal(40, seed=1), weights=1.0)
