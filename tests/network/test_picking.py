"""Models that return more than a tensor, and models that are scripted, exported or compiled."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.network.model_output import Picking
from tests.conftest import normal, small_mlp

X, Y = normal(60, 4, seed=0), normal(60, seed=1)


class ModelOutput(OrderedDict):
    """As that of HuggingFace: keys, attributes and indices."""

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else list(self.values())[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


Named = namedtuple("Named", "hidden logits")

RETURNS = {
    "tuple": (lambda h, out: (h, out), 1),
    "tuple from behind": (lambda h, out: (h, out), -1),
    "dict": (lambda h, out: {"hidden": h, "logits": out}, "logits"),
    "named tuple": (Named, "logits"),
    "model output": (lambda h, out: ModelOutput(hidden=h, logits=out), "logits"),
    "model output by index": (lambda h, out: ModelOutput(hidden=h, logits=out), 1),
    "function": (lambda h, out: [h, [out]], lambda returned: returned[1][0]),
}


class Returns(nn.Module):
    def __init__(self, kind: str, outputs: int = 1) -> None:
        super().__init__()
        plain = small_mlp(outputs=outputs)
        self.first, self.rest, self.kind = plain[0], plain[1:], kind
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        assert not self.training, "the root is in eval mode, too"
        hidden = self.first(x)
        return RETURNS[self.kind][0](hidden, self.rest(hidden) + self.shift)


MAKE = {
    "CP": lambda m, **k: ffcp.CP(m, **k),
    "FFCP": lambda m, **k: ffcp.FFCP(m, "first" if isinstance(m, Returns) else "0", **k),
    "LCP": lambda m, **k: ffcp.LCP(m, **k),
    "FFLCP": lambda m, **k: ffcp.FFLCP(m, "first" if isinstance(m, Returns) else "0", **k),
    "auto": lambda m, **k: ffcp.FFCP(m, selection_alpha=0.3, **k),
    "bands": lambda m, **k: ffcp.IntervalPredictor(
        m, scale=lambda seen: 1 + seen.output.abs(), **k
    ),
}


@pytest.mark.parametrize("kind", RETURNS)
@pytest.mark.parametrize("make", ["CP", "FFCP"])
def test_the_picked_tensor_is_the_prediction(make: str, kind: str) -> None:
    predictor = MAKE[make](Returns(kind), output=RETURNS[kind][1]).calibrate(X, Y)
    expected = MAKE[make](small_mlp()).calibrate(X, Y)
    torch.testing.assert_close(predictor(X), expected(X))


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_every_method_picks(make: str, tmp_path) -> None:
    model = Returns("dict").train()
    predictor = MAKE[make](model, output="logits").calibrate(X, Y)
    assert model.training
    band = predictor(X, alpha=0.3)
    assert torch.isfinite(band.upper).all()
    assert predictor.comparable()["output"] == "logits"
    predictor.save(tmp_path / "saved")
    loaded = MAKE[make](model, output="logits").load(tmp_path / "saved")
    assert loaded(X, alpha=0.3).upper.equal(band.upper)
    with pytest.raises(ValueError, match="output"):
        MAKE[make](model, output="hidden").load(tmp_path / "saved")


def test_names_of_layers_and_weights_are_unchanged() -> None:
    model = Returns("tuple")
    picking = Picking(model, 1)
    assert [n for n, _ in picking.named_modules()] == [n for n, _ in model.named_modules()]
    assert list(picking.state_dict()) == list(model.state_dict())
    picking.double()
    assert model.first.weight.dtype == torch.float64
    assert model.shift.dtype == torch.float64
    picking.eval()
    assert not model.training


def test_weights_that_change_are_seen() -> None:
    model = Returns("tuple")
    predictor = ffcp.CP(model, output=1).calibrate(X, Y)
    with torch.no_grad():
        model.first.weight.add_(1)
    with pytest.raises(RuntimeError, match="calibration"):
        predictor(X)


def test_gradient_norms_pick() -> None:
    prediction, norms = ffcp.gradient_norms(Returns("tuple"), X, ["first", "input"], output=1)
    expected, known = ffcp.gradient_norms(small_mlp(), X, ["0", "input"])
    torch.testing.assert_close(prediction, expected)
    torch.testing.assert_close(norms["first"], known["0"])
    torch.testing.assert_close(norms["input"], known["input"])


def test_a_dict_as_input_and_as_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Any:
            return ModelOutput(logits=self.layer(input_ids))

    predictor = ffcp.CP(Model(), output="logits").calibrate({"input_ids": X}, Y)
    assert predictor({"input_ids": X}).upper.shape == (60,)
    with pytest.raises(TypeError, match="token_type_ids"):
        predictor({"input_ids": X, "token_type_ids": X})


def test_sets_pick(tmp_path) -> None:
    model, y = Returns("dict", outputs=3), torch.randint(0, 3, (60,))
    plain = small_mlp(outputs=3)
    for make in (ffcp.LAC, ffcp.APS, ffcp.RAPS, ffcp.FFRAPS):
        predictor = make(model, output="logits", seed=0).calibrate(X, y)
        expected = make(plain, seed=0).calibrate(X, y)(X, first_row=0)
        assert predictor(X, first_row=0).mask.equal(expected.mask)


def test_pixel_sets_pick() -> None:
    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Any:
            return {"out": self.conv(x)}

    model, x, y = Maps(), torch.randn(20, 3, 4, 4), torch.randint(0, 4, (20, 4, 4))
    sets = ffcp.segmentation.PixelSets(model, "conv", output="out").calibrate(x, y)
    plain = ffcp.segmentation.PixelSets(nn.Sequential(model.conv), "0").calibrate(x, y)
    assert sets(x, 0.3).mask.equal(plain(x, 0.3).mask)
    assert sets.comparable()["output"] == "out"


@pytest.mark.parametrize(
    ("kind", "output", "message"),
    [
        ("dict", "logit", r"'logit'"),
        ("tuple", 2, "tuple"),
        ("tuple", "logits", "'logits'"),
        ("named tuple", "x", r"Named"),
        ("tuple", None, r"output="),
        ("tuple", lambda returned: returned, "tuple"),
    ],
)
def test_what_is_not_there_is_said(kind: str, output: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ffcp.CP(Returns(kind), output=output).calibrate(X, Y)


def test_nothing_to_pick_from_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"output="):
        ffcp.CP(small_mlp(), output=0).calibrate(X, Y)
    with pytest.raises(TypeError, match=r"1.5"):
        ffcp.CP(small_mlp(), output=1.5)


# -- scripted, traced, exported and compiled models ---------------------------------------------


def made(kind: str) -> nn.Module:
    model = small_mlp().eval()
    if kind == "scripted":
        return torch.jit.script(model)
    if kind == "traced":
        return torch.jit.trace(model, X)
    if kind == "exported":
        rows = {0: torch.export.Dim("rows")}
        return torch.export.export(model, (X,), dynamic_shapes=(rows,)).module()
    return torch.compile(model, backend="eager")


KINDS = ["scripted", "traced", "exported", "compiled"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_no_layer_works_with_every_kind(kind: str) -> None:
    model, plain = made(kind), small_mlp()
    for make in (ffcp.CP, ffcp.LCP, lambda m: ffcp.FFCP(m, "input")):
        torch.testing.assert_close(make(model).calibrate(X, Y)(X), make(plain).calibrate(X, Y)(X))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_the_automatic_choice_takes_what_there_is(kind: str) -> None:
    predictor = ffcp.FFCP(made(kind), selection_alpha=0.3).calibrate(X, Y)
    assert kind == "compiled" or predictor.feature in ("input", "output")
    assert torch.isfinite(predictor(X, alpha=0.3).upper).all()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_layer_inside_is_refused_when_the_predictor_is_made(kind: str) -> None:
    model = made(kind)
    with pytest.raises(ValueError, match=f"'0'.*{kind}"):
        ffcp.FFCP(model, "0")
    with pytest.raises(ValueError, match=f"{kind}"):
        ffcp.FFCP(nn.Sequential(OrderedDict(net=model)), "net.0")


def test_a_model_exported_for_some_numbers_of_rows_is_told_from_one_for_any() -> None:
    model = small_mlp().eval()
    fixed = torch.export.export(model, (X,)).module()
    for whole in (fixed, nn.Sequential(fixed)):
        with pytest.raises(ValueError, match=rf"{len(X)} rows"):
            ffcp.CP(whole)
    rows = {0: torch.export.Dim("rows", min=2, max=50)}
    bounded = torch.export.export(model, (X[:40],), dynamic_shapes=(rows,)).module()
    if torch.__version__ >= "2.5":  # before, torch itself lets any number pass
        too_many = r"does not take \d+ rows of this shape \(Guard failed"
        with pytest.raises(ValueError, match=too_many):
            ffcp.CP(bounded).calibrate(X, Y)
    some = ffcp.CP(bounded, batch_size=30).calibrate(X[:60], Y[:60])
    assert torch.isfinite(some(X[:60]).upper).all()


def test_a_compiled_part_hides_its_layers() -> None:
    with pytest.raises(ValueError, match="compiled"):
        ffcp.FFCP(nn.Sequential(made("compiled"), nn.Linear(1, 1)), "0._orig_mod.0")


def test_layers_of_a_compiled_model_are_those_of_the_original_and_compile_nothing() -> None:
    compilations = []

    def backend(graph: Any, example: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    plain = small_mlp()
    compiled = torch.compile(plain, backend=backend)
    for feature in ("0", "3", "_orig_mod.0", plain[3]):
        band = ffcp.FFCP(compiled, feature).calibrate(X, Y)(X)
        name = feature if isinstance(feature, nn.Module) else feature.removeprefix("_orig_mod.")
        torch.testing.assert_close(band, ffcp.FFCP(plain, name).calibrate(X, Y)(X))
    assert not compilations


def test_layers_of_a_traced_graph_work() -> None:
    graph = torch.fx.symbolic_trace(small_mlp().eval())
    expected = ffcp.FFCP(small_mlp(), "0").calibrate(X, Y)(X)
    torch.testing.assert_close(ffcp.FFCP(graph, "0").calibrate(X, Y)(X), expected)
