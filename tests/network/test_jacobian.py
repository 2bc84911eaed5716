"""Norms of the rows of the Jacobian of heads with many outputs: one value, four ways."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ffcp
from ffcp.network.cut import Cut
from ffcp.network.jacobian import Method, coloured, dispatch, pushed
from ffcp.network.model import borrowed
from ffcp.scales import Sketch, Smooth
from tests.conftest import normal, small_mlp


class Skip(nn.Module):
    """A residual head, with a second path around the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 1)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.last = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.first(x)
        return self.last(functional.gelu(self.conv(v)) + functional.avg_pool2d(v, 3, 1, 1))


def maps(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 1), *layers)


conv = nn.Conv2d
HEADS = {
    "3x3": lambda: maps(nn.ReLU(), conv(3, 4, 3, padding=1), nn.ReLU(), conv(4, 2, 1)),
    "1x1": lambda: maps(nn.ReLU(), conv(3, 4, 1), nn.Tanh(), conv(4, 3, 1)),
    "dilation": lambda: maps(nn.Tanh(), conv(3, 2, 3, padding=2, dilation=2)),
    "stride": lambda: maps(nn.Tanh(), conv(3, 2, 3, stride=2, padding=1)),
    "no padding": lambda: maps(nn.Tanh(), conv(3, 2, (3, 2))),
    "max pooling": lambda: maps(nn.MaxPool2d(2), nn.Tanh(), conv(3, 2, 1)),
    "average pooling": lambda: maps(nn.Tanh(), nn.AvgPool2d(3, 2), conv(3, 2, 1)),
    "bilinear": lambda: maps(
        nn.Tanh(), conv(3, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear")
    ),
    "corners": lambda: maps(
        nn.Tanh(), conv(3, 2, 1), nn.Upsample((11, 13), mode="bilinear", align_corners=True)
    ),
    "nearest": lambda: maps(nn.Tanh(), conv(3, 2, 1), nn.Upsample(scale_factor=3)),
    "transposed": lambda: maps(nn.Tanh(), nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1)),
    "softmax": lambda: maps(conv(3, 4, 1), nn.Softmax(dim=1)),
    "double log": lambda: maps(conv(3, 4, 3, padding=1), ffcp.segmentation.DoubleLog()),
    "in place": lambda: maps(nn.ReLU(inplace=True), conv(3, 2, 3, padding=1)),
    "groups": lambda: maps(nn.Tanh(), conv(3, 3, 3, padding=1, groups=3)),
    "batch norm": lambda: maps(nn.Tanh(), conv(3, 2, 3, padding=1), nn.BatchNorm2d(2)),
    "one dimension": lambda: nn.Sequential(
        nn.Conv1d(2, 3, 1), nn.Tanh(), nn.Conv1d(3, 2, 5, padding=4, dilation=2)
    ),
    "three dimensions": lambda: nn.Sequential(
        nn.Conv3d(2, 2, 1), nn.Tanh(), nn.Conv3d(2, 2, (1, 3, 3), padding=(0, 1, 1))
    ),
    "no channels": lambda: maps(nn.Tanh(), conv(3, 1, 3, padding=1), nn.Flatten(1, 2)),
}  # fmt: skip
SHAPES = {"one dimension": (2, 24), "three dimensions": (2, 3, 4, 5)}


def norms(model: nn.Module, x: Tensor, method: Method, feature: str = "0", norm=2):
    return ffcp.gradient_norms(model, x, [feature], norm, method=method)[1][feature]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_coloured_equals_exact(name: str, norm: float) -> None:
    model = HEADS[name]().eval()
    x = normal(3, *SHAPES.get(name, (2, 8, 9)), seed=1)
    exact = norms(model, x, "exact", norm=norm)
    torch.testing.assert_close(norms(model, x, "coloured", norm=norm), exact)
    assert bool((exact > 0).any())


@pytest.mark.parametrize("feature", ["input", "first"])
def test_coloured_sees_through_skip_connections(feature: str) -> None:
    model, x = Skip(), normal(2, 2, 8, 9, seed=1)
    exact = norms(model, x, "exact", feature)
    torch.testing.assert_close(norms(model, x, "coloured", feature), exact)


@pytest.mark.parametrize(
    ("name", "per_channel"),
    [("1x1", 1), ("3x3", 9), ("dilation", 9), ("max pooling", 1), ("stride", 4), ("nearest", 9)],
)
def test_outputs_share_passes_as_the_windows_allow(name: str, per_channel: int) -> None:
    model, x = HEADS[name](), normal(1, 2, 24, 36, seed=1)
    found = coloured.colours(model, x, "0")
    assert found.passes == per_channel * found.channels


def test_dead_units_do_not_hide_a_window() -> None:
    model = maps(nn.ReLU(), conv(3, 2, 3, padding=1))
    nn.init.constant_(model[0].bias, -100.0)  # every ReLU is dead at every input we have
    found = coloured.colours(model, torch.zeros(1, 2, 6, 6), "0")
    assert found.passes == 9 * found.channels


class Call(nn.Module):
    """A function as a layer."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def corner_elsewhere(v: Tensor) -> Tensor:
    """Add the first corner to the opposite one, behind the back of a NaN."""
    corner = v[:, :1, :1, :1].nan_to_num()
    far = functional.pad(corner, (0, v.shape[-1] - 1, 0, v.shape[-2] - 1)).flip(-1)
    return v + 3 * far


HIDES_A_NAN = {
    "where": lambda v: torch.where(v > 0, v, 0.0),
    "fmax": lambda v: torch.fmax(v, torch.zeros(())),
    "sort": lambda v: v.sort(dim=-1).values,
    "nan_to_num": torch.nan_to_num,
    "one output": corner_elsewhere,
}


def hiding(name: str) -> nn.Sequential:
    return maps(Call(HIDES_A_NAN[name]), conv(3, 4, 3, padding=1), nn.Tanh(), conv(4, 2, 1))


@pytest.mark.parametrize("name", HIDES_A_NAN)
@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_head_that_hides_its_windows_is_refused(name: str, norm: float, rows: int) -> None:
    model, x = hiding(name), normal(rows, 2, 8, 9, seed=1)
    for _ in range(2):  # also when it is known already
        with pytest.raises(ValueError, match=r"positions.*Sketch"):
            norms(model, x, "coloured", norm=norm)


@pytest.mark.parametrize("name", HIDES_A_NAN)
@pytest.mark.parametrize("norm", [1, 2])
def test_auto_falls_back_where_windows_are_hidden(name: str, norm: float) -> None:
    model, x = hiding(name), normal(3, 2, 8, 9, seed=1)
    for _ in range(2):
        assert norms(model, x, "auto", norm=norm).equal(norms(model, x, "exact", norm=norm))


def test_auto_estimates_many_outputs_whose_windows_are_hidden() -> None:
    model, x = hiding("where"), normal(1, 2, 46, 46, seed=1)  # 4,232 outputs
    assert norms(model, x, "auto").equal(norms(model, x, Sketch(32)))


def test_one_hidden_dependence_among_thousands_of_outputs_is_seen() -> None:
    for seed in range(20):
        model, x = maps(Call(corner_elsewhere), conv(3, 1, 1)), normal(1, 2, 40, 50, seed=seed)
        with pytest.raises(ValueError, match="positions"):
            norms(model, x, "coloured")


def shifts_where_it_is_large(v: Tensor) -> Tensor:
    """A dependence that only some inputs have, hidden from a NaN."""
    large = (v.amax(dim=(1, 2, 3), keepdim=True) > 50).to(v)
    return v + large * v.nan_to_num().roll(4, dims=-1)


def test_a_dependence_that_depends_on_the_input_is_seen_when_it_comes() -> None:
    model, x = maps(Call(shifts_where_it_is_large), conv(3, 2, 1)), normal(4, 2, 8, 9, seed=1)
    torch.testing.assert_close(norms(model, x, "coloured"), norms(model, x, "exact"))
    x[2] *= 1000
    with pytest.raises(ValueError, match="positions"):
        norms(model, x, "coloured")
    other = maps(Call(shifts_where_it_is_large), conv(3, 2, 1))
    _, parts = ffcp.gradient_norms(other, x, ["0"], batch_size=1)  # the third falls back
    torch.testing.assert_close(parts["0"], norms(other, x, "exact"))


def test_auto_does_not_mix_exact_norms_and_estimates() -> None:
    model, x = maps(Call(shifts_where_it_is_large), conv(3, 2, 1)), normal(2, 2, 46, 46, seed=1)
    x[1] *= 1000
    for _ in range(2):
        with pytest.raises(ValueError, match="positions"):
            ffcp.gradient_norms(model, x, ["0"], batch_size=1)


def test_a_head_that_takes_no_nan_is_not_coloured() -> None:
    def refuses(v: Tensor) -> Tensor:
        if v.isnan().any():
            raise RuntimeError("no NaN here")
        return v

    model, x = maps(Call(refuses), conv(3, 2, 3, padding=1)), normal(2, 2, 8, 9, seed=1)
    assert norms(model, x, "auto").equal(norms(model, x, "exact"))
    with pytest.raises(ValueError, match="coloured"):
        norms(model, x, "coloured")


def test_a_gradient_that_is_nan_is_not_taken_for_a_hidden_window() -> None:
    model = maps(Call(lambda v: v.abs().sqrt()), conv(3, 2, 3, padding=1))
    nn.init.zeros_(model[0].weight[0])
    nn.init.zeros_(model[0].bias)
    for method in ("coloured", "auto"):
        with pytest.raises(ValueError, match="'0'"):
            norms(model, torch.ones(3, 2, 8, 9), method)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["3x3", "bilinear", "transposed", "softmax", "batch norm"])
def test_rounding_is_not_taken_for_a_hidden_window(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        model, x = HEADS[name]().eval().to(dtype), normal(5, 2, 16, 18, seed=seed).to(dtype)
        assert norms(model, x, "coloured").isfinite().all()


def test_the_start_of_a_pass_is_left_alone_where_the_head_hands_it_on() -> None:
    model, x = maps(nn.Identity()), normal(2, 2, 5, 6, seed=1)
    assert norms(model, x, "coloured").equal(torch.ones(2, 3, 5, 6))


def test_only_maps_can_be_coloured() -> None:
    with pytest.raises(ValueError, match=r"\(5, 8\).*\(5, 3\)"):
        norms(small_mlp(outputs=3), normal(5, 4, seed=1), "coloured")


def test_windows_are_found_anew_when_a_layer_changes() -> None:
    model, x = HEADS["3x3"](), normal(2, 2, 8, 9, seed=1)
    norms(model, x, "coloured")
    model[2] = conv(3, 4, 5, padding=2)
    torch.testing.assert_close(norms(model, x, "coloured"), norms(model, x, "exact"))


def test_an_exchanged_layer_is_noticed_though_the_model_reads_the_same() -> None:
    model, x = HEADS["3x3"](), normal(2, 2, 8, 9, seed=1)
    for method in ("coloured", Sketch(4)):
        norms(model, x, method)
    text = str(model)
    model[2] = conv(3, 4, 3, padding=1)
    assert str(model) == text
    fresh = maps(*model[1:])
    fresh[0] = model[0]
    for method in ("coloured", Sketch(4)):
        torch.testing.assert_close(norms(model, x, method), norms(fresh, x, method))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("method", ["coloured", Sketch(4)], ids=str)
def test_a_copy_of_a_model_has_a_head_of_its_own(copied, method) -> None:
    model, x = Skip(), normal(2, 2, 8, 9, seed=1)
    before = norms(model, x, method, "first")
    other = copied(model)
    for parameter in other.conv.parameters():
        parameter.data.mul_(2)
    changed = norms(other, x, method, "first")
    assert not torch.allclose(changed, before)
    torch.testing.assert_close(norms(model, x, method, "first"), before)
    for parameter in model.conv.parameters():
        parameter.data.mul_(2)
    torch.testing.assert_close(norms(model, x, method, "first"), changed)


def test_the_twins_of_a_model_share_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = HEADS["3x3"](), normal(2, 2, 8, 9, seed=1)
    expected = norms(model, x, "coloured")
    monkeypatch.setattr(coloured, "_measured", lambda *args: pytest.fail("measured again"))
    with borrowed(model) as one, borrowed(model) as other:
        assert one is not other
        for frozen in (one, other):
            torch.testing.assert_close(norms(frozen, x, "coloured"), expected)


@pytest.mark.long
def test_what_is_known_of_a_model_dies_with_it() -> None:
    model = HEADS["3x3"]()
    norms(model, normal(1, 2, 6, 6, seed=1), "coloured")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_exact_needs_no_matrix_of_all_outputs() -> None:
    model = nn.Conv2d(1, 4, 1)
    x = torch.zeros(1, 1, 500, 500)  # a million outputs: their unit vectors would take 4 TB
    with Cut(model, ["input"]) as cut:
        tap = cut(x)
        first = next(iter(dispatch.jacobian_rows(tap, tap.edges["input"])))
    assert first[0].norm().item() == pytest.approx(model.weight[0].norm().item())


# -- how auto picks ----------------------------------------------------------------------------


def test_auto_colours_maps() -> None:
    model, x = HEADS["3x3"](), normal(2, 2, 12, 12, seed=1)
    assert norms(model, x, "auto").equal(norms(model, x, "coloured"))


def test_auto_takes_few_outputs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coloured, "colours", lambda *args: pytest.fail("probed the head"))
    model, x = HEADS["3x3"](), normal(2, 2, 5, 6, seed=1)  # 60 outputs
    assert norms(model, x, "auto").equal(norms(model, x, "exact"))


@pytest.mark.parametrize(("outputs", "norm", "expected"), [
    (4096, 2, "exact"), (4097, 2, Sketch(32)), (4097, 1, "exact")
])  # fmt: skip
def test_auto_estimates_only_what_cannot_be_coloured(outputs, norm, expected) -> None:
    model, x = nn.Linear(3, outputs), normal(2, 3, seed=1)
    found = norms(model, x, "auto", "input", norm)
    assert found.equal(norms(model, x, expected, "input", norm))


# -- sketches ----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_error_of_a_sketch_falls_with_the_root_of_the_probes() -> None:
    model, x = HEADS["3x3"](), normal(2, 2, 12, 12, seed=1)
    exact = norms(model, x, "exact")
    alive = exact > 0

    def error(probes: int) -> float:
        squares = [
            (norms(model, x, Sketch(probes, seed))[alive] / exact[alive] - 1).square().mean()
            for seed in range(8)
        ]
        return math.sqrt(torch.stack(squares).mean())

    # For Gaussian probes the relative error of a norm is 1 / sqrt(2 k); signs do no worse. The
    # mean over 8 seeds and hundreds of outputs is within a fifth of the law.
    for probes in (16, 64, 256):
        assert 0.6 < error(probes) * math.sqrt(2 * probes) < 1.2
    assert error(16) / error(256) == pytest.approx(4, rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize("method", [Sketch(5), Smooth(0.3, 3), Smooth(0.3, 3, method=Sketch(4))],
                         ids=str)  # fmt: skip
def test_the_norm_of_a_row_does_not_depend_on_the_batch(method) -> None:
    model, x = HEADS["3x3"](), normal(7, 2, 8, 9, seed=1)
    whole = norms(model, x, method)
    for size in (1, 3):
        _, parts = ffcp.gradient_norms(model, x, ["0"], batch_size=size, method=method)
        torch.testing.assert_close(parts["0"], whole)
    torch.testing.assert_close(norms(model, x[[4]], method), whole[[4]])


def test_a_sketch_in_small_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = HEADS["3x3"](), normal(7, 2, 8, 9, seed=1)
    whole = norms(model, x, Sketch(9))
    monkeypatch.setattr(pushed, "_BYTES", 10_000)
    torch.testing.assert_close(norms(model, x, Sketch(9)), whole)
    exact = norms(model, x, "exact")
    monkeypatch.setattr("ffcp.network.jacobian.dispatch._BYTES_AT_ONCE", 1)
    torch.testing.assert_close(norms(model, x, "exact"), exact)


def test_a_sketch_of_a_linear_head_is_off_by_the_same_factor_for_all_rows() -> None:
    model, x = nn.Linear(50, 20), normal(6, 50, seed=1)
    found = norms(model, x, Sketch(3), "input")
    torch.testing.assert_close(found, found[:1].expand_as(found))
    assert not torch.allclose(found[0], model.weight.norm(dim=1), rtol=0.02)


def test_a_sketch_takes_inputs_of_several_tensors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(30, 2), nn.Linear(40, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.a(a) + self.b(b)

    model, x = Two(), (normal(3, 30, seed=1), normal(3, 40, seed=2))
    expected = torch.cat([model.a.weight, model.b.weight], dim=1).norm(dim=1).expand(3, 2)
    torch.testing.assert_close(norms(model, x, Sketch(2000), "input"), expected, rtol=0.1, atol=0)


def test_other_seeds_give_other_sketches() -> None:
    model, x = HEADS["3x3"](), normal(1, 2, 8, 9, seed=1)
    assert not norms(model, x, Sketch(4)).equal(norms(model, x, Sketch(4, seed=1)))


def test_a_sketch_works_in_place_and_leaves_the_feature_alone() -> None:
    model, x = HEADS["in place"](), normal(3, 2, 8, 9, seed=1)
    plain = maps(nn.ReLU(), conv(3, 2, 3, padding=1))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(norms(model, x, Sketch(8)), norms(plain, x, Sketch(8)))


# -- smoothing ---------------------------------------------------------------------------------


def test_smoothing_is_the_mean_over_perturbed_features() -> None:
    model, x = small_mlp(outputs=2), normal(5, 4, seed=1)
    model.eval()
    v, sigma, samples = model[0](x).detach(), 0.5, 3
    expected = torch.zeros(5, 2)
    for sample in range(samples):
        seed = int(np.random.SeedSequence([0, sample]).generate_state(1, np.uint64)[0]) >> 1
        generator = torch.Generator().manual_seed(seed)
        noise = sigma * torch.randn(v.shape[1:], generator=generator)  # the same for every row
        jacobian = torch.func.vmap(torch.func.jacrev(model[1:], chunk_size=None))
        expected += jacobian((v + noise)[:, None]).reshape(5, 2, -1).norm(dim=2) / samples
    torch.testing.assert_close(norms(model, x, Smooth(sigma, samples)), expected)


def test_smoothing_revives_dead_units() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[0].bias, -0.5)
    x = torch.zeros(1, 1)
    assert norms(model, x, "exact").item() == 0
    assert norms(model, x, Smooth(1.0, 50)).item() > 0


def test_smoothing_does_not_change_the_prediction() -> None:
    model, x = small_mlp(), normal(5, 4, seed=1)
    prediction, _ = ffcp.gradient_norms(model, x, ["0"], method=Smooth(5.0, 2))
    torch.testing.assert_close(prediction, model.eval()(x).detach())


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Sketch(0), "probe"),
    (lambda: Smooth(0.0), "sigma"),
    (lambda: Smooth(1.0, 0), "sample"),
    (lambda: Smooth(1.0, method="fast"), "method"),
    (lambda: ffcp.FFCP(small_mlp(), "0", method="fast"), "method"),
    (lambda: norms(small_mlp(), torch.ones(1, 4), Sketch(2), norm=1), "norm=1"),
])  # fmt: skip
def test_bad_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_smoothing_cannot_be_nested() -> None:
    with pytest.raises(TypeError, match="Smooth"):
        Smooth(1.0, method=Smooth(1.0))


def test_scores_of_other_methods_do_not_mix(tmp_path) -> None:
    x, y = normal(30, 4, seed=1), normal(30, seed=2)
    model = small_mlp()
    sketched = ffcp.FFCP(model, "0", method=Sketch(4)).calibrate(x, y)
    other = ffcp.FFCP(model, "0", method=Sketch(8)).calibrate(x, y)
    with pytest.raises(ValueError, match="probes"):
        sketched.merge(other)
    sketched.save(tmp_path / "c.safetensors")
    again = ffcp.FFCP(model, "0", method=Sketch(4)).load(tmp_path / "c.safetensors")
    assert again.predict_interval(x).lower.equal(sketched.predict_interval(x).lower)
