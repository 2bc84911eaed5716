from __future__ import annotations

import gzip
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ffcp import FFCPWarning
from ffcp_paper import ffcp_internals
from ffcp_paper.data import images
from ffcp_paper.data.files import DataFile, MissingDataError
from ffcp_paper.experiments import logits
from ffcp_paper.networks import convnets, efficientnets, pretrained
from ffcp_paper.networks.pretrained import (
    NETWORKS,
    Accuracy,
    PackageFile,
    Preprocess,
    VisionNetwork,
)
from ffcp_paper.training.digits import train_digits


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory and an empty cache."""
    monkeypatch.setenv("FFCP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def webp(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "webp", lossless=True)
    return buffer.getvalue()


def packed(*parts: bytes) -> dict[str, np.ndarray]:
    offset = np.cumsum([0, *map(len, parts)])
    return {"blob": np.frombuffer(b"".join(parts), np.uint8), "offset": offset}


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def data_file(home: Path, name: str, content: bytes) -> DataFile:
    (home / name).write_bytes(content)
    return DataFile(name, "a test", hashlib.sha256(content).hexdigest())


def random_pixels(count: int, size: int = 8, seed: int = 0) -> np.ndarray:
    shape = (count, size, size, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# --- images -------------------------------------------------------------------------------------


def test_images_come_back_as_they_were_stored(home: Path) -> None:
    pixels = random_pixels(3)
    content = archive(label=np.int16([5, 0, 9]), **packed(*map(webp, pixels)))
    stored = images.imagenet(data_file(home, "few.npz", content))
    assert len(stored) == 3
    assert stored.labels.tolist() == [5, 0, 9]
    assert stored.labels.dtype == torch.int64
    np.testing.assert_array_equal(stored.pixels(1, 3, size=8), pixels[1:])
    assert stored.pixels(0, 2, size=12).shape == (2, 12, 12, 3)


def test_compressed_archive_is_read(home: Path) -> None:
    content = archive(label=np.int16([1]), **packed(webp(random_pixels(1)[0])))
    file = data_file(home, "few.npz", content)
    (home / "few.npz").unlink()
    (home / "few.npz.gz").write_bytes(gzip.compress(content))
    assert images.imagenet(file).labels.tolist() == [1]
    (home / "few.npz.gz").write_bytes(gzip.compress(content)[:-20])
    with pytest.raises(ValueError, match=r"few\.npz\.gz"):
        images.imagenet(file)


def test_tiles_of_a_sheet_are_read_row_by_row(home: Path) -> None:
    sheet = np.zeros((640, 800, 3), dtype=np.uint8)
    for row in range(20):
        for column in range(25):
            sheet[row * 32 : row * 32 + 32, column * 32 : column * 32 + 32] = (row, column, 7)
    sheet[40, 5] = 99  # row 1, column 0; inside the tile: 8 down, 5 right
    content = archive(label=np.arange(500) % 10, **packed(webp(sheet)))
    stored = images.cifar10(data_file(home, "sheet.npz", content))
    pixels = stored.pixels(0, 500, size=32)
    assert pixels.shape == (500, 32, 32, 3)
    assert pixels[:, 0, 0].tolist() == [[n // 25, n % 25, 7] for n in range(500)]
    assert pixels[25, 8, 5].tolist() == [99, 99, 99]


def test_offsets_that_do_not_fit_are_refused(home: Path) -> None:
    parts = packed(webp(random_pixels(1)[0]))
    two_labels = data_file(home, "a.npz", archive(label=np.int16([1, 2]), **parts))
    with pytest.raises(ValueError, match="labels"):
        images.imagenet(two_labels)
    parts["offset"] = parts["offset"] + 1
    shifted = data_file(home, "b.npz", archive(label=np.int16([1]), **parts))
    with pytest.raises(ValueError, match="offsets"):
        images.imagenet(shifted)


def test_pickled_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="allow_pickle=False"):
        images.arrays(archive(label=np.array([{}], dtype=object)))


def test_missing_file_names_source_and_remedy(home: Path) -> None:
    with pytest.raises(MissingDataError, match="imagenet_val5k"):
        images.imagenet()
    with pytest.raises(MissingDataError, match="mobilenet_v2"):
        NETWORKS["mobilenet_v2"].load()


def test_wrong_checksum_is_refused(home: Path) -> None:
    path = home / NETWORKS["squeezenet"].weights.path
    path.parent.mkdir()
    path.write_bytes(archive(a=np.zeros(1)))
    with pytest.raises(ValueError, match=r"squeezenet_v1\.0\.npz"):
        NETWORKS["squeezenet"].load()


# --- files of packages ----------------------------------------------------------------------------


def fake_package(root: Path, content: bytes) -> PackageFile:
    (root / "no_code").mkdir()
    (root / "no_code" / "__init__.py").write_text("raise SystemExit('was run')")
    (root / "no_code" / "w.pth").write_bytes(content)
    info = root / "no_code-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: no-code\nVersion: 0.1.0\n")
    return PackageFile("no-code", "no_code/w.pth", hashlib.sha256(b"weights").hexdigest())


def test_weights_in_a_package_are_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fake_package(tmp_path, b"weights")
    assert file.found is None
    monkeypatch.syspath_prepend(str(tmp_path))
    assert images.read(file) == b"weights"
    (tmp_path / "no_code" / "w.pth").write_bytes(b"other weights")
    with pytest.raises(ValueError, match="no-code"):
        images.read(file)


def test_missing_package_names_the_extra() -> None:
    file = PackageFile("no-such-package-anywhere", "no_such/w.pth")
    with pytest.raises(MissingDataError, match="vision"):
        file.require()


# --- networks -----------------------------------------------------------------------------------


def test_same_padding_by_hand() -> None:
    convolution = convnets.SameConv2d(1, 1, 3, stride=2, bias=False)
    nn.init.ones_(convolution.weight)
    x = torch.arange(1.0, 17).reshape(1, 1, 4, 4)
    # Even size: windows start at pixels 0 and 2, the only padding is behind the last one.
    assert convolution(x).tolist() == [[[[54.0, 45.0], [72.0, 54.0]]]]
    # Odd size: one pixel on each side.
    x = torch.arange(1.0, 10).reshape(1, 1, 3, 3)
    assert convolution(x).tolist() == [[[[12.0, 16.0], [24.0, 28.0]]]]


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_same_padding_gives_tensorflows_size(kernel: int, stride: int) -> None:
    for size in range(kernel, 12):
        before, after = convnets.same_padding(size, kernel, stride)
        assert (size + before + after - kernel) // stride + 1 == -(-size // stride)
        assert 0 <= after - before <= 1


def test_weights_below_the_zero_point_do_not_wrap_around() -> None:
    stored = {
        "03.w": np.uint8([[[[0, 255]]]]),
        "03.s": np.float32(0.25),
        "03.z": np.int32(128),
        "03.b": np.float32([1.5]),
    }
    weight, bias = convnets.dequantise(stored, 3)
    assert weight.tolist() == [[[[-32.0, 31.75]]]]
    assert bias.tolist() == [1.5]


PLAN = [
    {"op": "conv", "layer": 0, "src": -1, "stride": 2, "act": "relu6", "range": [0.0, 6.0]},
    {"op": "dw", "layer": 1, "src": 0, "stride": 1, "act": "none", "range": [-9.0, 9.0]},
    {"op": "add", "src": [1, 0]},
    {"op": "gap", "src": 2},
    {"op": "conv", "layer": 2, "src": 3, "stride": 1, "act": "none", "range": [-9.0, 9.0]},
]


def plan_archive(plan: list[dict[str, Any]] = PLAN) -> bytes:
    """A MobileNet of two layers and three classes, with a background class before them."""
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {"plan": json.dumps(plan)}
    for layer, shape in enumerate([(4, 3, 3, 3), (4, 1, 3, 3), (4, 4, 1, 1)]):
        stored[f"{layer:02d}.w"] = rng.integers(0, 256, shape, dtype=np.uint8)
        stored[f"{layer:02d}.s"] = np.float32(0.01)
        stored[f"{layer:02d}.z"] = np.int32(120)
        stored[f"{layer:02d}.b"] = rng.normal(size=4).astype(np.float32)
    return archive(**stored)


def test_planned_network_computes_its_plan() -> None:
    content = plan_archive()
    model = convnets.mobilenet(content)
    stored = images.arrays(content)
    (w0, b0), (w1, b1), (w2, b2) = (convnets.dequantise(stored, layer) for layer in range(3))
    x = torch.randn(2, 3, 8, 8)
    first = nn.functional.conv2d(nn.functional.pad(x, (0, 1, 0, 1)), w0, b0, stride=2).clamp(0, 6)
    second = first + nn.functional.conv2d(first, w1, b1, padding=1, groups=4)
    feature = second.mean(dim=(2, 3))
    expected = feature @ w2[1:, :, 0, 0].T + b2[1:]  # without the background
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.feature(x), feature)
    assert ffcp_internals.resolve(model, "feature.steps.1.conv") == "feature.steps.1.conv"


def test_plan_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="tile"):
        convnets.mobilenet(plan_archive([*PLAN[:2], {"op": "tile", "src": 1}, *PLAN[3:]]))
    with pytest.raises(ValueError, match="average"):
        convnets.mobilenet(plan_archive(PLAN[:-1]))


def squeezenet_archive() -> bytes:
    rng = np.random.default_rng(0)
    shapes = {"conv1": (96, 3, 7, 7), "conv_final": (1000, 512, 1, 1)}
    inputs = 96
    for fire, squeezed in zip(range(2, 10), (16, 16, 32, 32, 48, 48, 64, 64), strict=True):
        shapes[f"fire{fire}.conv1x1_1"] = (squeezed, inputs, 1, 1)
        shapes[f"fire{fire}.conv1x1_2"] = (4 * squeezed, squeezed, 1, 1)
        shapes[f"fire{fire}.conv3x3_2"] = (4 * squeezed, squeezed, 3, 3)
        inputs = 8 * squeezed
    stored = {}
    for name, shape in shapes.items():
        stored[f"{name}.w"] = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[1])
        stored[f"{name}.b"] = rng.normal(size=shape[0]).astype(np.float32)
    return archive(**stored)


def test_squeezenet_has_a_map_as_feature_and_a_head_of_its_own() -> None:
    model = convnets.squeezenet(squeezenet_archive())
    with torch.no_grad():
        feature = model.feature(torch.randn(1, 3, 227, 227))
        out = model.head(feature)
    assert feature.shape == (1, 512, 13, 13)
    assert out.shape == (1, 1000)
    conv = model.head.conv
    inside = nn.functional.conv2d(feature, conv.weight, conv.bias).relu().sum(dim=(2, 3))
    border = (15 * 15 - 13 * 13) * conv.bias.relu()  # where only zeros come in
    torch.testing.assert_close(out, (inside + border) / 15**2)


def cifar_state(blocks: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}

    def add(conv: str, norm: str, inputs: int, outputs: int) -> None:
        state[f"{conv}.weight"] = torch.randn(outputs, inputs, 3, 3) / 3 / inputs**0.5
        for kind in ("weight", "bias", "running_mean", "running_var"):
            state[f"{norm}.{kind}"] = torch.rand(outputs)

    add("conv1", "bn1", 3, 16)
    inputs = 16
    for layer, outputs in ((1, 16), (2, 32), (3, 64)):
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            add(f"{name}.conv1", f"{name}.bn1", inputs, outputs)
            add(f"{name}.conv2", f"{name}.bn2", outputs, outputs)
            inputs = outputs
    return {**state, "linear.weight": torch.randn(10, 64), "linear.bias": torch.randn(10)}


def checkpoint(state: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_cifar_resnet_takes_its_depth_from_the_checkpoint() -> None:
    model = convnets.cifar_resnet(checkpoint(cifar_state(blocks=2)))
    assert len(model.feature.layer3) == 2
    assert model.feature(torch.randn(2, 3, 32, 32)).shape == (2, 64)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert not model.training


def test_shortcut_keeps_every_other_pixel_between_empty_channels() -> None:
    block = convnets.BasicBlock(2, 6, stride=2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 4, 4)
    out = block(x)
    torch.testing.assert_close(out[:, 2:4], x[:, :, ::2, ::2])
    assert out[:, [0, 1, 4, 5]].eq(0).all()


def test_checkpoint_of_another_network_is_refused() -> None:
    state = cifar_state()
    state["layer1.0.bn3.weight"] = torch.rand(16)
    with pytest.raises(ValueError, match=r"layer1\.0\.bn3\.weight"):
        convnets.cifar_resnet(checkpoint(state))


class Unsafe:
    def __reduce__(self) -> Any:
        return print, ("code was run",)


def test_checkpoint_with_code_is_refused() -> None:
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        convnets.state_dict(checkpoint({"a": Unsafe()}))  # type: ignore[dict-item]


EFFICIENTNET_NAMES = {
    "expand.conv": "_expand_conv",
    "expand.norm": "_bn0",
    "depthwise.conv": "_depthwise_conv",
    "depthwise.norm": "_bn1",
    "project.conv": "_project_conv",
    "project.norm": "_bn2",
}


def efficientnet_state() -> dict[str, torch.Tensor]:
    """A made-up checkpoint under the names of the packages, with the shapes of lite0."""
    torch.manual_seed(0)
    state = {"_conv_stem.weight": torch.randn(32, 3, 3, 3), "_fc.weight": torch.randn(1000, 1280)}
    norms = {"_bn0": 32, "_bn1": 1280}
    for number, block in enumerate(efficientnets.efficientnet_blocks(1.0, 1.0)):
        for name, value in block.state_dict().items():
            part, kind = name.rsplit(".", 1)
            state[f"_blocks.{number}.{EFFICIENTNET_NAMES[part]}.{kind}"] = value
    state["_conv_head.weight"] = torch.randn(1280, 320, 1, 1)
    for name, channels in norms.items():
        for kind in ("weight", "bias", "running_mean", "running_var"):
            state[f"{name}.{kind}"] = torch.rand(channels)
    return {**state, "_fc.bias": torch.randn(1000)}


def test_efficientnet_reads_the_names_of_the_packages() -> None:
    state = efficientnet_state()
    model = efficientnets.efficientnet_lite(checkpoint(state), 1.0, 1.0)
    torch.testing.assert_close(model.feature.top.norm.bias.data, state["_bn1.bias"])
    torch.testing.assert_close(
        model.feature.blocks[3].depthwise.conv.weight.data,
        state["_blocks.3._depthwise_conv.weight"],
    )
    with torch.no_grad():
        assert model.feature(torch.randn(1, 3, 33, 33)).shape == (1, 1280)
        assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    with pytest.raises(ValueError, match=r"blocks\.10\.depthwise"):
        efficientnets.efficientnet_lite(checkpoint(state), 1.0, 1.1)


def test_stored_features_stand_in_for_images(home: Path) -> None:
    feat, weight = np.float16([[1, 2], [3, 4]]), np.float16([[1, 0], [0, 1], [1, 1]])
    content = archive(
        feat=feat, fc_weight=weight, fc_bias=np.float32([0, 0, 1]), label=np.int16([2, 1])
    )
    network = VisionNetwork(
        "stored", "Stored", "imagenet", data_file(home, "f.npz", content), pretrained.stored_head,
        None, Accuracy(2, 50.0),
    )  # fmt: skip
    inputs = network.inputs()
    assert inputs.labels.tolist() == [2, 1]
    assert network.load()(inputs.batch(0, 2)).tolist() == [[1, 2, 4], [3, 4, 8]]
    assert network.files == (network.weights,)


def test_preprocessing_by_hand() -> None:
    pixels = np.uint8([[[[10, 20, 30]]]])
    assert Preprocess(1, 127.0, 128.0)(pixels).flatten().tolist() == [
        -117 / 128, -107 / 128, -97 / 128
    ]  # fmt: skip
    swapped = Preprocess(1, (1.0, 2.0, 3.0), 1.0, bgr=True)(pixels)
    assert swapped.flatten().tolist() == [29, 18, 7]


def test_registry_is_complete() -> None:
    for name, network in NETWORKS.items():
        assert network.name == name
        assert network.data in ("imagenet", "cifar10")
        assert all(file.sha256 is not None for file in network.files)
    assert "torchvision" not in NETWORKS["resnet152"].title
    with pytest.raises(ValueError, match="vgg"):
        logits.compute("vgg")


# --- cached features and logits -------------------------------------------------------------------

ROWS = 25


@pytest.fixture
def tiny(home: Path, monkeypatch: pytest.MonkeyPatch) -> VisionNetwork:
    """The planned network on 25 images, in chunks of 10 and batches of 4."""
    content = archive(label=np.arange(ROWS) % 3, **packed(*map(webp, random_pixels(ROWS))))
    stored = data_file(home, "images.npz", content)
    monkeypatch.setitem(pretrained._DATA_SETS, "tiny", (stored, lambda: images.imagenet(stored)))
    monkeypatch.setattr(logits, "CHUNK", 10)
    monkeypatch.setattr(logits, "BATCH", 4)
    weights = data_file(home, "weights.npz", plan_archive())
    preprocess = Preprocess(8, 127.5, 127.5)
    return VisionNetwork(
        "tiny", "Tiny", "tiny", weights, convnets.mobilenet, preprocess, Accuracy(1, 0.0)
    )


class StoppedError(Exception):
    pass


def left_in_cache(network: VisionNetwork) -> list[str]:
    return sorted(path.name for path in logits.cached_path(network).parent.iterdir())


def test_computed_is_what_the_network_says(tiny: VisionNetwork) -> None:
    computed = logits.compute(tiny)
    inputs, model = tiny.inputs(), tiny.load()
    x = inputs.batch(0, ROWS)
    torch.testing.assert_close(computed.features, model.feature(x))
    torch.testing.assert_close(computed.logits, model(x))
    assert computed.labels.tolist() == inputs.labels.tolist()
    assert computed.features.dtype == computed.logits.dtype == torch.float32
    torch.testing.assert_close(computed.head(computed.features), computed.logits)
    torch.testing.assert_close(tiny.head()(computed.features), computed.logits)
    assert left_in_cache(tiny) == [logits.cached_path(tiny).name]


def test_second_call_needs_neither_files_nor_time(tiny: VisionNetwork, home: Path) -> None:
    first = logits.compute(tiny)
    for path in home.iterdir():
        path.unlink()
    calls: list[tuple[int, int]] = []
    second = logits.compute(tiny, lambda *done: calls.append(done))
    assert calls == []
    assert second.logits.equal(first.logits)
    assert second.head(second.features).equal(first.head(first.features))


def test_progress_counts_images(tiny: VisionNetwork) -> None:
    calls: list[tuple[int, int]] = []
    logits.compute(tiny, lambda *done: calls.append(done))
    assert [done for done, _ in calls] == [4, 8, 10, 14, 18, 20, 24, 25]
    assert {total for _, total in calls} == {ROWS}


def test_interrupted_run_is_resumed(tiny: VisionNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 14:
            raise StoppedError

    with pytest.raises(StoppedError):
        logits.compute(tiny, stop)
    assert not logits.cached_path(tiny).exists()
    computed_rows: list[tuple[int, int]] = []
    run = logits._run

    def counted(model: Any, inputs: Any, start: int, end: int, progress: Any) -> Any:
        computed_rows.append((start, end))
        return run(model, inputs, start, end, progress)

    monkeypatch.setattr(logits, "_run", counted)
    resumed = logits.compute(tiny)
    assert computed_rows == [(10, 20), (20, 25)]
    torch.testing.assert_close(resumed.logits, tiny.load()(tiny.inputs().batch(0, ROWS)))
    assert left_in_cache(tiny) == [logits.cached_path(tiny).name]


@pytest.mark.parametrize("moment", [8, 10, 24, 25])
def test_two_runs_at_once_agree(tiny: VisionNetwork, moment: int) -> None:
    others: list[logits.Computed] = []

    def meanwhile(done: int, total: int) -> None:
        if done == moment:  # another run finishes, and removes the chunks
            others.append(logits.compute(tiny))

    mine = logits.compute(tiny, meanwhile)
    assert len(others) == 1
    assert mine.logits.equal(others[0].logits)
    assert left_in_cache(tiny) == [logits.cached_path(tiny).name]


def test_failed_write_leaves_nothing_behind(
    tiny: VisionNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Any, target: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ffcp_paper.experiments.logits.os.replace", full)
        with pytest.raises(OSError, match="no space left"):
            logits.compute(tiny)
    chunks = logits.cached_path(tiny).with_suffix(".chunks")
    assert list(chunks.iterdir()) == []
    assert len(logits.compute(tiny).labels) == ROWS


def test_damaged_cache_is_computed_again(tiny: VisionNetwork) -> None:
    first = logits.compute(tiny)
    path = logits.cached_path(tiny)
    content = path.read_bytes()
    del first
    for damaged in (content[:100], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.warns(FFCPWarning, match="cache"):
            again = logits.compute(tiny)
        assert path.read_bytes() == content
    assert len(again.labels) == ROWS


def test_other_weights_have_another_place_in_the_cache(tiny: VisionNetwork, home: Path) -> None:
    other = data_file(home, "other.npz", plan_archive() + b" ")
    assert logits.cached_path(tiny) != logits.cached_path(
        VisionNetwork(
            "tiny", "Tiny", "tiny", other, convnets.mobilenet, tiny.preprocess, tiny.expected
        )
    )


# --- digits ---------------------------------------------------------------------------------------


def test_digits_are_split_without_overlap() -> None:
    data = images.digits(seed=3)
    rows = torch.cat([data.x_train, data.x_cal, data.x_test]).flatten(1)
    whole = torch.cat([part.flatten(1) for part in images.digits(seed=4)[::2]])
    assert rows.shape == (1797, 64)
    torch.testing.assert_close(rows.sum(dim=0), whole.sum(dim=0))
    assert len(rows.unique(dim=0)) == len(whole.unique(dim=0))
    assert not data.x_train.equal(images.digits(seed=4).x_train)
    assert rows.min() == 0
    assert rows.max() == 1
    with pytest.raises(ValueError, match=r"\b1797\b"):
        images.digits(train=1500, calibrate=400)


def test_digits_network_is_accurate_and_reproducible() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    model, data = train_digits(seed=1)
    assert torch.random.get_rng_state().equal(before)
    assert pretrained.topk_accuracy(model(data.x_test), data.y_test) > 94
    first, second = (train_digits(seed=1, epochs=2)[0] for _ in range(2))
    assert first(data.x_test).equal(second(data.x_test))
    with ffcp_internals.Cut(model, ["feature.conv2", "feature"]) as cut:
        tap = cut(data.x_test[:5])
        (gradient,) = torch.autograd.grad(tap.prediction.sum(), tap.edges["feature"])
    torch.testing.assert_close(gradient, model.head.weight.sum(dim=0).expand(5, 32))


# --- with the data ------------------------------------------------------------------------------

# The first rows, how many of them are right, and how many have the label among five.
FIRST_ROWS = {
    "resnet152": (500, 358, 456),
    "efficientnet_lite0": (20, 12, 18),
    "efficientnet_lite1": (20, 15, 18),
    "efficientnet_lite2": (20, 11, 20),
    "mobilenet_v2": (30, 22, 27),
    "mobilenet_v1_075": (30, 17, 26),
    "mobilenet_v1_050": (50, 23, 37),
    "squeezenet": (20, 8, 15),
    "mobilenet_v1_025": (100, 34, 68),
    "cifar10_resnet56": (100, 96, 100),
    "cifar10_resnet20": (200, 182, 200),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", NETWORKS)
def test_pretrained_network_has_its_accuracy(name: str) -> None:
    network = NETWORKS[name]
    if not network.available:
        pytest.skip(f"the files of {network.title} are not in FFCP_DATA or not installed")
    rows, top1, top5 = FIRST_ROWS[name]
    inputs, model = network.inputs(), network.load()
    with torch.inference_mode():
        batches = [inputs.batch(row, min(row + 10, rows)) for row in range(0, rows, 10)]
        out = network.head()(torch.cat([model.feature(batch) for batch in batches]))
    labels = inputs.labels[:rows]
    measured = [round(pretrained.topk_accuracy(out, labels, k) * rows / 100) for k in (1, 5)]
    assert measured == [top1, top5]
    assert ffcp_internals.resolve(model, network.feature) == "feature"


def test_imagenet_labels_are_flat() -> None:
    if images.IMAGENET_FILE.found is None:
        pytest.skip("the ImageNet images are not in FFCP_DATA")
    stored = images.imagenet()
    assert stored.labels.bincount().tolist() == [5] * 1000
    assert stored.pixels(0, 2, size=224).shape == (2, 224, 224, 3)


def test_activations_that_overwrite_change_nothing(tiny: VisionNetwork) -> None:
    plain, saving, inputs = tiny.load(), tiny.load(), tiny.inputs()
    logits._set_inplace(saving.get_submodule("feature"))
    assert any(getattr(layer, "inplace", False) for layer in saving.modules())
    before = inputs.batch(0, ROWS).clone()
    expected = logits._run(plain, inputs, 0, ROWS, lambda done: None)
    found = logits._run(saving, inputs, 0, ROWS, lambda done: None)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0)
    torch.testing.assert_close(inputs.batch(0, ROWS), before, rtol=0, atol=0)
