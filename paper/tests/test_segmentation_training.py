from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ffcp import FFCPWarning
from ffcp.segmentation import double_log, targets
from ffcp_paper import ffcp_internals
from ffcp_paper.data import images, label_maps
from ffcp_paper.data.label_maps import LabelledImages
from ffcp_paper.networks import convnets, segmentation_nets
from ffcp_paper.training import segmentation_training
from ffcp_paper.training.segmentation_training import Augment

# --- the residual network -------------------------------------------------------------------------


def small_net(seed: int = 0) -> nn.Sequential:
    return segmentation_nets.residual_net(
        4, width=4, outputs=6, hidden=5, dilations=(1, 2), seed=seed
    )


@pytest.mark.parametrize("size", [(16, 16), (18, 20), (36, 44)])
def test_output_has_half_the_size_of_the_image(size: tuple[int, int]) -> None:
    model, half = small_net(), tuple(side // 2 for side in size)
    x = torch.randn(2, 3, *size)
    assert model.feature(x).shape == (2, 6, *half)
    assert model(x).shape == (2, 4, *half)


def test_head_is_two_convolutions_behind_a_feature_without_relu() -> None:
    model = small_net()
    names = [name for name, _ in model.head.named_children()]
    assert names == ["relu0", "conv1", "relu1", "conv2", "scores"]
    x = torch.randn(2, 3, 16, 16)
    feature = model.feature(x)
    assert (feature < 0).any()  # a ReLU would leave zeros, with no gradient behind them
    before = feature.clone()
    torch.testing.assert_close(model.head(feature), model(x))
    assert feature.equal(before)  # nothing works in place
    assert ffcp_internals.resolve(model, "feature") == "feature"


def test_first_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (small_net(seed).state_dict() for seed in (1, 1, 2))
    assert torch.random.get_rng_state().equal(before)
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["head.conv1.weight"].equal(other["head.conv1.weight"])


def test_an_output_depends_on_its_surroundings_and_is_in_its_place() -> None:
    model = small_net()
    x = torch.zeros(1, 3, 64, 64)
    x[:, :, 40:44, 20:24] = 5
    change = (model(x) - model(torch.zeros_like(x))).abs().sum(dim=1)[0]
    middle = (change.flatten() @ torch.cartesian_prod(torch.arange(32.0), torch.arange(32.0))).div(
        change.sum()
    )
    torch.testing.assert_close(middle, torch.tensor([20.5, 10.5]), atol=2, rtol=0)
    assert (change > 0).float().mean() > 0.3


# --- classes merged -------------------------------------------------------------------------------


def test_softmax_over_groups_is_the_sum_over_members() -> None:
    merge = segmentation_nets.MergeClasses(segmentation_nets.CITYSCAPES_TO_CAMVID)
    logits = 5 * torch.randn(2, 19, 3, 4)
    group = torch.tensor(segmentation_nets.CITYSCAPES_TO_CAMVID)
    summed = torch.zeros(2, 11, 3, 4).index_add(1, group, logits.softmax(dim=1))
    torch.testing.assert_close(merge(logits).softmax(dim=1), summed)


def test_groups_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="gaps"):
        segmentation_nets.MergeClasses([0, 2])


# --- DeepLab from its plan ------------------------------------------------------------------------

PLAN: list[dict[str, Any]] = [
    {"op": "conv", "layer": 0, "src": -1, "stride": 2, "dilation": 1, "pad": "same", "act": "relu"},
    {"op": "dw", "layer": 1, "src": 0, "stride": 1, "dilation": 2, "pad": "same", "act": "none"},
    {"op": "gap", "src": 1},
    {"op": "conv", "layer": 2, "src": 2, "stride": 1, "dilation": 1, "pad": "same", "act": "relu"},
    {"op": "tile", "src": 3, "hw": [4, 4]},
    {"op": "concat", "src": [4, 1]},
    {"op": "conv", "layer": 3, "src": 5, "stride": 1, "dilation": 1, "pad": "same", "act": "none"},
    {"op": "resize", "src": 6, "hw": [8, 8], "align_corners": True},
]
LAYERS = [(4, 3, 3, 3), (4, 1, 3, 3), (5, 4, 1, 1), (19, 9, 1, 1)]


def plan_archive(plan: list[dict[str, Any]] = PLAN) -> bytes:
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {"plan": json.dumps(plan)}
    for layer, shape in enumerate(LAYERS):
        stored[f"{layer:02d}.w"] = rng.integers(0, 256, shape, dtype=np.uint8)
        stored[f"{layer:02d}.s"] = np.float32(0.01)
        stored[f"{layer:02d}.z"] = np.int32(120)
        stored[f"{layer:02d}.b"] = rng.normal(size=shape[0]).astype(np.float32)
    buffer = io.BytesIO()
    np.savez(buffer, **stored)
    return buffer.getvalue()


def test_plan_with_dilation_tile_and_concat_is_computed() -> None:
    content = plan_archive()
    stored = images.arrays(content)
    (w0, b0), (w1, b1), (w2, b2), (w3, b3) = (
        convnets.dequantise(stored, layer) for layer in range(4)
    )
    x = torch.randn(2, 3, 8, 8)
    conv = nn.functional.conv2d
    first = conv(nn.functional.pad(x, (0, 1, 0, 1)), w0, b0, stride=2).relu()
    second = conv(first, w1, b1, padding=2, dilation=2, groups=4)
    third = conv(second.mean(dim=(2, 3), keepdim=True), w2, b2).relu()
    feature = torch.cat([third.expand(-1, -1, 4, 4), second], dim=1)  # in the plan's order
    logits = nn.functional.interpolate(
        conv(feature, w3, b3), (6, 5), mode="bilinear", align_corners=True
    )
    model = segmentation_nets.deeplab(content, size=(6, 5), scores=False)
    torch.testing.assert_close(model.feature(x), feature)
    merged = model(x)
    assert merged.shape == (2, 11, 6, 5)
    torch.testing.assert_close(merged[:, 0], logits[:, 10])  # sky has one member
    torch.testing.assert_close(merged[:, 5], logits[:, [8, 9]].logsumexp(dim=1))  # tree has two
    scores = segmentation_nets.deeplab(content, size=(6, 5))(x)
    squeezed = 0.01 + 0.98 * merged.double().softmax(dim=1)
    torch.testing.assert_close(scores, double_log(squeezed).float(), rtol=1e-4, atol=1e-4)
    assert segmentation_nets.predicted_labels(scores).equal(merged.argmax(dim=1))


def test_plan_that_is_not_deeplabs_is_refused() -> None:
    with pytest.raises(ValueError, match="convolution"):
        segmentation_nets.deeplab(plan_archive(PLAN[:-1]))
    valid = [{**PLAN[0], "pad": "valid"}, *PLAN[1:]]
    with pytest.raises(ValueError, match="valid"):
        segmentation_nets.deeplab(plan_archive(valid))
    with pytest.raises(ValueError, match="mul"):
        segmentation_nets.deeplab(plan_archive([PLAN[0], {**PLAN[1], "op": "mul"}, *PLAN[2:]]))


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_dilated_same_padding_gives_tensorflows_size(dilation: int, stride: int) -> None:
    for size in range(2 * dilation + 1, 14):
        before, after = convnets.same_padding(size, 3, stride, dilation)
        reach = 2 * dilation + 1
        assert (size + before + after - reach) // stride + 1 == -(-size // stride)
        assert 0 <= after - before <= 1
        convolution = convnets.SameConv2d(1, 1, 3, stride=stride, dilation=dilation)
        assert convolution(torch.zeros(1, 1, size, 9)).shape[2] == -(-size // stride)


def test_deeplab_inputs_are_squeezed_and_scaled() -> None:
    pixels = torch.full((1, 3, 36, 48), 255, dtype=torch.uint8)
    pixels[:, :, :18] = 0
    x = segmentation_nets.deeplab_inputs(pixels)
    assert x.shape == (1, 3, 513, 513)
    assert (float(x[0, 0, 0, 0]), float(x[0, 0, -1, -1])) == (-1.0, 127 / 128)


# --- training -------------------------------------------------------------------------------------


def test_augmented_image_and_labels_stay_together() -> None:
    # The image is the label map itself, so wherever a window is cut they must agree.
    labels = torch.randint(0, 4, (8, 3, 4)).repeat_interleave(8, 1).repeat_interleave(8, 2).byte()
    pixels = (
        (40 * labels).repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None].repeat(1, 3, 1, 1)
    )
    augment = Augment(smallest=0.5, size=0.75, light=0.0)
    x, cut = augment(pixels, labels, torch.Generator().manual_seed(0))
    assert x.shape == (8, 3, 36, 48)
    assert cut.shape == (8, 18, 24)
    assert cut.dtype == torch.uint8
    seen = nn.functional.avg_pool2d(x[:, 0], 2)
    wanted = label_maps.normalised(40 * cut)
    assert ((seen - wanted).abs() < 0.3).float().mean() > 0.8  # all but the edges
    assert not cut.equal(augment(pixels, labels, torch.Generator().manual_seed(1))[1])


def test_labels_that_cannot_be_cut_along_are_refused() -> None:
    pixels, labels = torch.zeros(1, 3, 16, 24).byte(), torch.zeros(1, 8, 9).byte()
    with pytest.raises(ValueError, match="multiples"):
        Augment()(pixels, labels, torch.Generator())


def test_mirror_window_and_light_occur_and_are_bounded() -> None:
    ramp = torch.arange(32, dtype=torch.uint8).expand(1, 3, 16, 32)
    labels = torch.zeros(1, 8, 16, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    augment = Augment(smallest=0.5, size=0.5, light=0.1)
    found = [augment(ramp, labels, generator)[0][0, 0, 0] for _ in range(60)]
    slopes = torch.stack([(row[-1] - row[0]) * 64 / 15 for row in found])
    assert 15 < int((slopes < 0).sum()) < 45  # mirrored
    steps = slopes.abs()
    assert steps.min() < 1.2 < 1.6 < steps.max() < 2.4  # the window is half of it to all of it
    level = torch.stack([row.mean() for row in found])
    assert 0.5 < level.max() - level.min() < 1.5


def test_unlabelled_pixels_leave_loss_and_gradient_alone() -> None:
    logits, weights = torch.randn(1, 2, 1, 3, requires_grad=True), torch.ones(2)
    labels = torch.tensor([[[0, 1, 9]]]).byte()
    data = LabelledImages("three", ("a", "b"), 9, torch.zeros(1, 3, 1, 3).byte(), labels)
    shares = segmentation_training.blurred_shares(labels, data)
    assert shares[..., 2].eq(0).all()
    loss = segmentation_training.weighted_loss(logits, shares, weights)
    first = nn.functional.cross_entropy(logits[..., :2], shares[..., :2])
    torch.testing.assert_close(loss, first)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[..., 2].eq(0).all()
    assert logits.grad[..., :2].ne(0).all()
    nothing = segmentation_training.weighted_loss(logits[..., 2:], shares[..., 2:], weights)
    assert float(nothing.detach()) == 0


def test_targets_of_unlabelled_pixels_leave_loss_and_gradient_alone() -> None:
    scores, wanted = torch.randn(1, 2, 1, 3, requires_grad=True), torch.randn(1, 2, 1, 3)
    wanted[..., 2] = torch.nan
    loss = segmentation_training.masked_mse(scores, wanted)
    torch.testing.assert_close(loss, nn.functional.mse_loss(scores[..., :2], wanted[..., :2]))
    loss.backward()
    assert scores.grad is not None
    assert scores.grad[..., 2].eq(0).all()
    assert scores.grad[..., :2].ne(0).all()


def test_learning_rate_rises_then_falls() -> None:
    rates = [segmentation_training.one_cycle(step, 40) for step in range(40)]
    top = rates.index(max(rates))
    assert top == 4
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert (rates[0], rates[top]) == (0, 1)


class KilledError(Exception):
    pass


SETTINGS: dict[str, Any] = {
    "seed": 3,
    "batch_size": 8,
    "augment": Augment(smallest=0.7, light=0.1),
}


def with_dropout(seed: int = 0) -> nn.Sequential:
    """A network whose training draws random numbers of its own."""
    model = small_net(seed)
    return convnets.classifier(model.feature, nn.Sequential(nn.Dropout(0.2), *model.head))


@pytest.fixture(scope="module")
def few() -> LabelledImages:
    return label_maps.shapes(20, size=(16, 24), seed=5)


def kill_after(epochs: int) -> segmentation_training.Progress:
    lines = []

    def progress(message: str) -> None:
        lines.append(message)
        if len(lines) == epochs:
            raise KilledError

    return progress


def test_killed_training_ends_in_the_same_weights(few: LabelledImages, tmp_path: Path) -> None:
    straight = segmentation_training.fit(with_dropout(), few, epochs=4, **SETTINGS)
    path = tmp_path / "run" / "half.safetensors"
    with pytest.raises(KilledError):
        segmentation_training.fit(
            with_dropout(), few, epochs=4, checkpoint=path, progress=kill_after(2), **SETTINGS
        )
    torch.manual_seed(99)  # another process has another random state
    lines: list[str] = []
    resumed = segmentation_training.fit(
        with_dropout(), few, epochs=4, checkpoint=path, progress=lines.append, **SETTINGS
    )
    assert [line[:12] for line in lines] == ["epoch 3 of 4", "epoch 4 of 4"]
    assert not resumed.training
    for name, value in straight.state_dict().items():
        assert value.equal(resumed.state_dict()[name]), name
    # Finished: nothing is left to do.
    again = segmentation_training.fit(
        with_dropout(), few, epochs=4, checkpoint=path, progress=lines.append, **SETTINGS
    )
    assert len(lines) == 2
    assert again(few.inputs()).equal(straight(few.inputs()))


def test_training_leaves_the_callers_random_state_alone(few: LabelledImages) -> None:
    before = torch.random.get_rng_state()
    segmentation_training.fit(with_dropout(), few, epochs=1, **SETTINGS)
    assert torch.random.get_rng_state().equal(before)


def test_checkpoint_of_another_training_is_refused(few: LabelledImages, tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    segmentation_training.fit(small_net(), few, epochs=1, checkpoint=path, **SETTINGS)
    kept = path.read_bytes()
    others = {
        "epochs": lambda: segmentation_training.fit(
            small_net(), few, epochs=2, checkpoint=path, **SETTINGS
        ),
        "first weights": lambda: segmentation_training.fit(
            small_net(1), few, epochs=1, checkpoint=path, **SETTINGS
        ),
        "data": lambda: segmentation_training.fit(
            small_net(), few.take(slice(1, 20)), epochs=1, checkpoint=path, **SETTINGS
        ),
        "augment": lambda: segmentation_training.fit(
            small_net(), few, epochs=1, checkpoint=path, **{**SETTINGS, "augment": None}
        ),
    }
    for what, other in others.items():
        with pytest.raises(ValueError, match=what):
            other()
    assert path.read_bytes() == kept  # and it is still there for the one it belongs to


def test_damaged_checkpoint_is_told_and_training_starts_over(
    few: LabelledImages, tmp_path: Path
) -> None:
    path = tmp_path / "one.safetensors"
    first = segmentation_training.fit(small_net(), few, epochs=1, checkpoint=path, **SETTINGS)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.warns(FFCPWarning, match="one.safetensors"):
        second = segmentation_training.fit(small_net(), few, epochs=1, checkpoint=path, **SETTINGS)
    assert first(few.inputs()).equal(second(few.inputs()))
    path.write_bytes(b"")
    with pytest.warns(FFCPWarning, match="safetensors"):
        segmentation_training.fit(small_net(), few, epochs=1, checkpoint=path, **SETTINGS)


def test_training_learns_the_targets() -> None:
    # One class a half: a network that learns anything learns this.
    labels = torch.zeros(16, 8, 8, dtype=torch.uint8)
    labels[::2, :, 4:] = 1
    labels[1::2, :, :4] = 1
    labels[:, 0] = 9
    pixels = (200 * labels.clamp(max=1)).repeat_interleave(2, 1).repeat_interleave(2, 2)
    data = LabelledImages("halves", ("a", "b"), 9, pixels[:, None].repeat(1, 3, 1, 1), labels)
    model = segmentation_nets.residual_net(2, width=4, outputs=4, hidden=8, dilations=(1,))
    segmentation_training.fit(model, data, epochs=30, learning_rate=2e-2)
    out = model(data.inputs()).detach()
    counts = label_maps.confusion(segmentation_nets.predicted_labels(out), labels, 2, ignore=9)
    assert label_maps.pixel_accuracy(counts) > 0.95
    wanted = targets(labels, 2, ignore=9)
    known = ~wanted.isnan()
    assert (out - wanted)[known].square().mean() < 0.25 * wanted[known].var()


def test_trained_network_is_kept_and_its_checkpoint_removed(
    few: LabelledImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    recipe = segmentation_training.Recipe(
        small_net, lambda seed: few, 1, 8, 1e-3, 1e-3, 0.0, Augment(), "1"
    )
    monkeypatch.setitem(segmentation_training.RECIPES, "few", recipe)
    lines: list[str] = []
    first = segmentation_training.trained("few", progress=lines.append)
    second = segmentation_training.trained("few", progress=lines.append)
    assert len(lines) == 1
    assert first(few.inputs()).equal(second(few.inputs()))
    assert not second.training
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == ["networks"]
    assert not segmentation_training.trained("few", seed=1)(few.inputs()).equal(first(few.inputs()))
    with pytest.raises(ValueError, match="name"):
        segmentation_training.trained("no such")


def test_every_setting_is_part_of_the_key() -> None:
    recipe = segmentation_training.RECIPES["camvid"]
    keys = {json.dumps(recipe.key("camvid", 0), sort_keys=True)}
    for name, value in {
        "epochs": 1, "batch_size": 1, "learning_rate": 1.0, "weight_decay": 1.0, "balance": 1.0,
        "augment": None, "version": "0",
    }.items():  # fmt: skip
        other = segmentation_training.Recipe(**{**vars(recipe), name: value})
        keys.add(json.dumps(other.key("camvid", 0), sort_keys=True))
    keys.add(json.dumps(recipe.key("camvid", 1), sort_keys=True))
    assert len(keys) == 9


# --- with the data --------------------------------------------------------------------------------


@pytest.mark.heavy
def test_deeplab_has_its_accuracy() -> None:
    if segmentation_nets.DEEPLAB_FILE.found is None or label_maps.CAMVID_FILE.found is None:
        pytest.skip("DeepLab or the CamVid images are not in FFCP_DATA")
    model = segmentation_nets.deeplab(images.read(segmentation_nets.DEEPLAB_FILE), size=(360, 480))
    (val,) = label_maps.camvid(360, 480, 360, 480, splits=["val"]).values()
    few = val.take(slice(0, 100, 25))
    with torch.inference_mode():
        feature = model.feature(segmentation_nets.deeplab_inputs(few.pixels))
        assert feature.shape == (4, 128, 33, 33)
        predicted = segmentation_nets.predicted_labels(model.head(feature))
    counts = label_maps.confusion(predicted, few.labels, 11, ignore=11)
    # Measured once; all 101 images have 86.8 % and 0.514.
    assert label_maps.pixel_accuracy(counts) == pytest.approx(0.8776, abs=1e-3)
    assert label_maps.mean_iou(counts) == pytest.approx(0.5069, abs=2e-3)


# --- rare classes ---------------------------------------------------------------------------------


def noise() -> LabelledImages:
    """Images of noise: one in ten is all of the second class, and nothing shows it."""
    pixels = torch.randint(0, 256, (60, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    labels = (torch.arange(60) % 10 == 0)[:, None, None].expand(60, 4, 4)
    return LabelledImages("noise", ("common", "rare"), 255, pixels.byte(), labels.byte())


def test_weights_of_balanced_classes_add_up_to_the_same() -> None:
    data = noise()
    share = float((data.labels == 1).float().mean())
    for balance in (0.0, 0.5, 1.0):
        weights = segmentation_training.class_weights(data, balance)
        ratio = float(weights[1] / weights[0])
        assert ratio == pytest.approx(((1 - share) / share) ** balance, rel=1e-5)
        assert float((1 - share) * weights[0] + share * weights[1]) == pytest.approx(1, rel=1e-5)
        assert len(weights) == 2


def test_the_loss_is_least_at_the_weighted_shares() -> None:
    data = noise()
    shares = segmentation_training.blurred_shares(data.labels, data)
    called = []
    for balance in (0.0, 0.5, 1.5):
        weights = segmentation_training.class_weights(data, balance)
        logits = (weights * shares.sum(dim=(0, 2, 3))).log().requires_grad_()
        whole = logits[:, None, None].expand_as(shares)
        segmentation_training.weighted_loss(whole, shares, weights).backward()
        assert logits.grad is not None
        assert float(logits.grad.abs().max()) < 1e-5
        called.append(int(logits.argmax()))
    assert called == [0, 0, 1]  # odds of 1 to 9 become 1 to 3, and 3 to 1


def test_a_class_that_was_lost_comes_back() -> None:
    # Its outputs are flat there: squared errors of them would leave it lost.
    data = noise()
    model = segmentation_nets.residual_net(2, width=4, outputs=4, hidden=4, dilations=(1,))
    with torch.no_grad():
        model.head.conv2.bias.copy_(torch.tensor([30.0, -30.0]))
    lost = copy.deepcopy(model)
    settings: dict[str, Any] = {"epochs": 40, "batch_size": 4, "learning_rate": 1.0}
    segmentation_training.fit(lost, data, **settings)
    segmentation_training.fit(model, data, **settings, balance=1.5)
    with torch.inference_mode():
        assert (segmentation_nets.predicted_labels(lost(data.inputs())) == 0).all()
        assert (segmentation_nets.predicted_labels(model(data.inputs())) == 1).float().mean() > 0.9


def test_a_network_of_another_kind_is_not_trained(few: LabelledImages) -> None:
    with pytest.raises(ValueError, match="DoubleLog"):
        segmentation_training.fit(nn.Sequential(nn.Conv2d(3, 4, 1)), few, epochs=1, balance=0.5)


def test_a_balanced_training_is_more_ready_to_call_the_rare_class() -> None:
    data, rare = noise(), []
    for balance in (0.0, 1.5):
        model = segmentation_nets.residual_net(2, width=4, outputs=4, hidden=4, dilations=(1,))
        segmentation_training.fit(model, data, epochs=3, batch_size=4, balance=balance)
        with torch.inference_mode():
            rare.append(float(model(data.inputs())[:, 1].mean()))
    assert rare[1] < rare[0] - 0.3  # small scores are likely classes
