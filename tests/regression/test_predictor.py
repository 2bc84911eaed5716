"""Predictors of bands as a user meets them: data in, state, files, memory."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from tests.conftest import normal, small_mlp
from tests.rows import watched_inputs

X, Y, NEW = normal(200, 4, seed=0), normal(200, seed=1), normal(50, 4, seed=2)


def test_alpha_is_an_argument_of_predict(mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp, "0").calibrate(X, Y)
    wide, narrow = (predictor.predict_interval(NEW, alpha=a) for a in (0.05, 0.5))
    assert (wide.lower <= narrow.lower).all()
    assert (wide.upper >= narrow.upper).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_float_type_of_the_model(mlp: nn.Module, dtype: torch.dtype) -> None:
    mlp.to(dtype)
    predictor = ffcp.FFCP(mlp, "0").calibrate(X.to(dtype), Y)
    band = predictor.predict_interval(NEW.to(dtype))
    assert {part.dtype for part in band} == {dtype}
    assert predictor.calibration.scores.dtype == torch.float64
    assert ffcp.metrics.coverage(predictor.predict_interval(X.to(dtype)), Y) >= 0.9


def test_arrays_lists_and_tensors_give_the_same_band(mlp: nn.Module) -> None:
    expected = ffcp.FFCP(mlp, "0").calibrate(X, Y).predict_interval(NEW)
    read_only = X.double().numpy().copy()
    read_only.setflags(write=False)
    for x, y in [(X.numpy(), Y.numpy()), (read_only, Y.tolist()), (X.tolist(), Y.numpy())]:
        band = ffcp.FFCP(mlp, "0").calibrate(x, y).predict_interval(NEW.double().numpy())
        torch.testing.assert_close(band, expected)


@pytest.mark.parametrize("feature", ["0", "auto"])
def test_loader_and_arrays_give_the_same_calibration(mlp: nn.Module, feature: str) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        a = ffcp.FFCP(mlp, feature).calibrate(X, Y)
        b = ffcp.FFCP(mlp, feature).calibrate(loader)
        c = ffcp.FFCP(mlp, feature, batch_size=11).calibrate((x, y) for x, y in [(X, Y)])
    assert a.feature == b.feature == c.feature
    torch.testing.assert_close(a.calibration.scores, b.calibration.scores, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(a.calibration.scores, c.calibration.scores, rtol=1e-4, atol=1e-6)


def test_calibrating_again_replaces_and_update_adds(mlp: nn.Module) -> None:
    whole = ffcp.CP(mlp).calibrate(X, Y).calibration.scores
    predictor = ffcp.CP(mlp).calibrate(NEW, torch.zeros(50)).calibrate(X[:80], Y[:80])
    assert len(predictor.calibration) == 80
    predictor.calibrate(X[80:], Y[80:], update=True)
    torch.testing.assert_close(predictor.calibration.scores, whole)


def test_merging_two_workers_equals_one(mlp: nn.Module) -> None:
    whole = ffcp.FFCP(mlp, "0").calibrate(X, Y)
    parts = [ffcp.FFCP(mlp, "0").calibrate(X[i::2], Y[i::2]) for i in range(2)]
    merged = parts[0].merge(parts[1])
    assert merged is parts[0]
    torch.testing.assert_close(merged.calibration.scores, whole.calibration.scores)


def test_merge_refuses_scores_that_mean_another_thing(mlp: nn.Module) -> None:
    one = ffcp.FFCP(mlp, "0").calibrate(X, Y)
    for other in (ffcp.FFCP(mlp, "3"), ffcp.FFCP(mlp, "0", norm=1), ffcp.CP(mlp)):
        with pytest.raises(ValueError, match="settings"):
            one.merge(other.calibrate(X, Y))
    with pytest.raises(ValueError, match="itself"):
        one.merge(one)
    with pytest.raises(TypeError, match="Linear"):
        one.merge(nn.Linear(1, 1))


# -- modules, state, files ---------------------------------------------------------------------


def test_state_dict_carries_the_calibration(mlp: nn.Module) -> None:
    old = ffcp.FFCP(mlp, "0").calibrate(X, Y)
    new = ffcp.FFCP(small_mlp(), "0")
    new.load_state_dict(old.state_dict())
    torch.testing.assert_close(new.predict_interval(NEW), old.predict_interval(NEW))


def test_state_dict_carries_the_choice(mlp: nn.Module, tmp_path) -> None:
    y = mlp.eval()(X).detach()[:, 0] * (1 + 0.3 * torch.randn(200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        old = ffcp.FFCP(mlp).calibrate(X, y)
    torch.save(old.state_dict(), tmp_path / "state.pt")
    new = ffcp.FFCP(small_mlp())
    new.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (new.feature, new.choice) == (old.feature, old.choice)
    torch.testing.assert_close(new.predict_interval(NEW), old.predict_interval(NEW))
    with pytest.raises(ValueError, match="settings"):
        ffcp.FFCP(small_mlp(), "input").load_state_dict(old.state_dict())


def test_converting_the_predictor_converts_the_model_only(mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp, "0").calibrate(X, Y)
    scores = predictor.calibration.scores.clone()
    predictor.double()
    assert mlp[0].weight.dtype == torch.float64
    predictor.half()
    assert torch.equal(predictor.calibration.scores, scores)
    assert predictor.calibration.scores.dtype == torch.float64


def test_predictor_can_be_copied(mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp, mlp[0]).calibrate(X, Y)
    frozen = copy.deepcopy(predictor)
    torch.testing.assert_close(frozen.predict_interval(NEW), predictor.predict_interval(NEW))


def test_save_and_load(mlp: nn.Module, tmp_path) -> None:
    path = tmp_path / "calibration.safetensors"
    old = ffcp.FFCP(mlp, "0").calibrate(X, Y)
    old.save(path)
    new = ffcp.FFCP(mlp, "0").load(path)
    torch.testing.assert_close(new.predict_interval(NEW), old.predict_interval(NEW))
    assert path.stat().st_size < 200 * 8 + 2000  # scores, not weights
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_load_refuses_other_weights_and_damaged_files(mlp: nn.Module, tmp_path) -> None:
    path = tmp_path / "calibration.safetensors"
    predictor = ffcp.CP(mlp).calibrate(X, Y)
    predictor.save(path)
    scores = predictor.calibration.scores.clone()
    with torch.no_grad():
        mlp[0].weight += 0.1
    with pytest.raises(ValueError, match="weights"):
        predictor.load(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=path.name):
        predictor.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=path.name):
        predictor.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        predictor.load(tmp_path / "nothing")
    assert torch.equal(predictor.calibration.scores, scores)


def test_a_failed_save_leaves_the_old_file(mlp: nn.Module, tmp_path, monkeypatch) -> None:
    path = tmp_path / "calibration.safetensors"
    predictor = ffcp.CP(mlp).calibrate(X, Y)
    predictor.save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        predictor.calibrate(X[:20], Y[:20]).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_repr_says_what_it_is(mlp: nn.Module) -> None:
    shown = repr(ffcp.FFCP(mlp, "0").calibrate(X, Y))
    assert "feature='0'" in shown
    assert "200" in shown


# -- memory ------------------------------------------------------------------------------------


def test_no_graph_outlives_its_batch(mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp, "input").calibrate(X, Y)
    band = predictor.predict_interval(NEW)
    prediction, norms = ffcp.gradient_norms(mlp, NEW, ["0"])
    kept = [*band, prediction, *norms.values(), predictor.score(X, Y), predictor.calibration.scores]
    assert not any(tensor.requires_grad for tensor in kept)


def test_a_predictor_goes_with_its_last_name(mlp: nn.Module) -> None:
    gc.disable()  # which would find circles in the end, and until then all scores stay
    try:
        predictor = ffcp.FFCP(mlp, "0").calibrate(X, Y)
        predictor.predict_interval(NEW)
        kept = weakref.ref(predictor.calibration)
        del predictor
        assert kept() is None
    finally:
        gc.enable()


def test_the_graph_of_a_batch_is_freed_before_the_next(mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp, "input", batch_size=10).calibrate(X, Y)
    held: weakref.WeakSet[Held] = weakref.WeakSet()
    at_start: list[int] = []

    class Held:
        """A tensor that some graph keeps for its backward pass."""

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            held.add(self)

    with (
        watched_inputs(lambda _: at_start.append(len(held)), mlp),
        torch.autograd.graph.saved_tensors_hooks(Held, lambda kept: kept.tensor),
    ):
        predictor.predict_interval(X)
        assert len(held) == 0
        kept = mlp(X)
        assert kept.requires_grad
        assert len(held) > 0, "the counter counts nothing"
    assert at_start[:20] == [0] * 20


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [ffcp.CP, lambda m: ffcp.FFCP(m, "input"),
                                  lambda m: ffcp.FCP(m, "0", steps=3)])  # fmt: skip
def test_all_of_it_works_under_the_callers_no_grad(make, context, mlp: nn.Module) -> None:
    expected = make(mlp).calibrate(X, Y).predict_interval(NEW)
    with context():
        predictor = make(mlp).calibrate(X.clone(), Y.clone())
        band = predictor.predict_interval(NEW.double().numpy())
    torch.testing.assert_close(band, expected)
    assert not predictor.calibration.scores.is_inference()
    predictor.load_state_dict(predictor.state_dict())
    predictor.calibrate(X, Y, update=True)


def test_numpy_types_are_fine_for_alpha(mlp: nn.Module) -> None:
    predictor = ffcp.CP(mlp).calibrate(X, Y)
    expected = predictor.predict_interval(NEW, alpha=0.1)
    for alpha in (np.float32(0.1), np.float64(0.1), torch.tensor(0.1)):
        torch.testing.assert_close(predictor.predict_interval(NEW, alpha=alpha), expected)


def test_saved_files_have_the_permissions_of_any_new_file(tmp_path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    saved = tmp_path / "saved"
    ffcp.CP(small_mlp()).calibrate(X, Y).save(saved)
    assert saved.stat().st_mode == plain.stat().st_mode
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "saved"]


def test_a_predictor_says_what_to_compile_in_its_place(mlp: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="compile"):
        ffcp.CP(mlp).compile()


@pytest.mark.long
def test_torch_compile_of_a_predictor_is_refused_in_the_same_words(mlp: nn.Module) -> None:
    x, y = normal(50, 4, seed=0), normal(50, seed=1)
    predictor = ffcp.FFCP(mlp, "0").calibrate(x, y)
    before = predictor(x)
    compiled = torch.compile(predictor, backend="eager")
    around = torch.compile(lambda x: predictor.predict_interval(2 * x).lower, backend="eager")
    for rows in (5, 7):  # dynamo ended in an error of its own at the second shape
        for call in (compiled, around):
            with pytest.raises(RuntimeError, match="FFCP"):
                call(x[:rows])
    calm = torch.compiler.disable(predictor.forward)  # as the error says
    function = torch.compile(lambda x: calm(x).lower + 1, backend="eager")
    for rows in (5, 7, 50):
        assert torch.equal(function(x[:rows]), predictor(x[:rows]).lower + 1)
    assert torch.equal(predictor(x).lower, before.lower)


def size_of(seen: ffcp.BatchOutput) -> Tensor:
    return 1 + seen.x[:, 0].abs()


@pytest.mark.parametrize(
    ("make", "weighted"),
    [
        (lambda m: ffcp.CP(m, side="upper"), False),
        (lambda m: ffcp.IntervalPredictor(m, scale=size_of), False),
        (lambda m: ffcp.LCP(m, ffcp.kernels.Localizer("box", "input", 5.0)), False),
        (lambda m: ffcp.CP(m, calibration=ffcp.calibrations.Weighted("given")), True),
    ],
    ids=["CP", "scale", "local", "weighted"],
)
def test_a_calibration_does_not_change_with_the_data_it_came_from(make, weighted: bool) -> None:
    x, y = normal(90, 4, seed=0).numpy(), normal(90, seed=1).double().numpy()
    own = {"weights": np.ones(90)} if weighted else {}
    new = {"weights": np.ones(50)} if weighted else {}
    predictor = make(small_mlp()).calibrate(x, y, **own)
    before = predictor.predict_interval(NEW, **new)
    for array in (x, y, *own.values()):
        array += 1
    torch.testing.assert_close(predictor.predict_interval(NEW, **new), before, rtol=0, atol=0)
