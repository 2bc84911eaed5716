from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ffcp_paper.data import label_maps
from ffcp_paper.data.files import DataFile, MissingDataError
from ffcp_paper.data.label_maps import LabelledImages

# --- the container --------------------------------------------------------------------------------


def test_rows_are_taken_from_images_and_labels_alike() -> None:
    data = label_maps.shapes(6)
    taken = data.take(torch.tensor([4, 1]))
    assert taken.pixels.equal(data.pixels[[4, 1]])
    assert taken.labels.equal(data.labels[[4, 1]])
    assert len(data.take(slice(2, 6))) == 4


def test_inputs_do_not_depend_on_the_other_images() -> None:
    data = label_maps.shapes(4)
    assert data.take([2]).inputs().equal(data.inputs()[2:3])
    assert data.inputs().abs().max() <= 2


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(1, 3, 4, 4), torch.zeros(1, 4, 4).byte(), "uint8"),
        (torch.zeros(1, 1, 4, 4).byte(), torch.zeros(1, 4, 4).byte(), "shape"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(1, 4, 4).byte(), r"\b2\b"),
    ],
)
def test_scenes_that_do_not_fit_are_refused(
    pixels: torch.Tensor, labels: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LabelledImages("odd", ("a",), None, pixels, labels)


def test_joining_keeps_the_order_and_refuses_other_labels() -> None:
    first, second = label_maps.shapes(2), label_maps.shapes(3, seed=1)
    joined = label_maps.join([first, second])
    assert joined.labels[2:].equal(second.labels)
    other = LabelledImages("other", ("a", "b"), None, first.pixels, first.labels)
    with pytest.raises(ValueError, match="labels"):
        label_maps.join([first, other])


def test_split_is_random_complete_and_without_overlap() -> None:
    calibration, test = label_maps.split(50, 20, seed=1)
    assert torch.cat([calibration, test]).sort().values.tolist() == list(range(50))
    assert not calibration.equal(label_maps.split(50, 20, seed=2)[0])
    assert calibration.equal(label_maps.split(50, 20, seed=1)[0])
    # Every image is as likely to be used for calibration as any other.
    often = torch.cat([label_maps.split(50, 20, seed=seed)[0] for seed in range(500)]).bincount()
    assert (often - 200).abs().max() < 5 * (500 * 0.4 * 0.6) ** 0.5
    for calibrate in (0, 50):
        with pytest.raises(ValueError, match=r"\b50\b"):
            label_maps.split(50, calibrate)


# --- shapes ---------------------------------------------------------------------------------------


def test_shapes_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = label_maps.shapes(70, seed=3)
    torch.manual_seed(2)
    np.random.seed(2)
    again = label_maps.shapes(80, seed=3)
    assert first.pixels.equal(again.pixels[:70])
    assert first.labels.equal(again.labels[:70])
    assert not first.labels.equal(label_maps.shapes(70, seed=4).labels)
    assert len(first.labels.flatten(1).unique(dim=0)) == 70  # the second chunk is not the first


def test_no_class_is_rare() -> None:
    labels = label_maps.shapes(300).labels
    share = labels.flatten().bincount() / labels.numel()
    assert len(share) == label_maps.shapes(1).classes
    assert 0.5 < share[0] < 0.9
    assert share[1:].min() > 0.03
    seen = torch.stack([(labels == kind).flatten(1).any(dim=1) for kind in (1, 2, 3)]).sum(dim=0)
    assert (seen > 0).float().mean() > 0.95  # a shape may be hidden or outside, but seldom
    assert set(seen.tolist()) >= {1, 2, 3}


def test_labels_lie_where_the_shapes_are_painted() -> None:
    # The colour of a pixel says more about the label there than about one further off.
    data = label_maps.shapes(200)
    red = data.inputs()[:, 0] - data.inputs()[:, 1:].mean(dim=1)
    red = torch.nn.functional.avg_pool2d(red[:, None], 2)[:, 0]

    def contrast(shift: tuple[int, int]) -> float:
        disc = data.labels.roll(shift, dims=(1, 2)) == 1
        return float(red[disc].mean() - red[~disc].mean())

    here = contrast((0, 0))
    assert all(here > contrast(shift) for shift in ((1, 0), (-1, 0), (0, 1), (0, -1)))


def painted(kind: int, **changes: float) -> torch.Tensor:
    values = {"y": 16.0, "x": 16.0, "radius": 8.0, "aspect": 0.5, "angle": 0.0} | changes
    shape = label_maps._Shape(
        np.array([kind]), **{k: np.array([v], dtype=np.float32) for k, v in values.items()}
    )
    return torch.from_numpy(shape.covers(label_maps._grid(32, 32, 1))[0])


def test_shapes_have_their_area() -> None:
    assert int(painted(1).sum()) == pytest.approx(np.pi * 64, rel=0.05)
    assert int(painted(2).sum()) == 16 * 8
    assert int(painted(3).sum()) == pytest.approx(12 * 0.6 * 12 * 8 / 8, rel=0.1)


def test_rotation_by_a_quarter_turns_the_rectangle() -> None:
    assert painted(2, angle=np.pi / 2).equal(painted(2).T)


def test_sizes_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        label_maps.shapes(1, size=(33, 48))
    with pytest.raises(ValueError, match="count"):
        label_maps.shapes(0)


# --- CamVid ---------------------------------------------------------------------------------------


def webp(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "webp", lossless=True)
    return buffer.getvalue()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory."""
    monkeypatch.setenv("FFCP_DATA", str(tmp_path))
    return tmp_path


def small_camvid(home: Path, **changes: Any) -> tuple[DataFile, dict[str, np.ndarray]]:
    """Two images of 8 x 12 pixels for each split."""
    rng = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}
    for name in label_maps.CAMVID_SPLITS:
        pixels = rng.integers(0, 256, (2, 8, 12, 3), dtype=np.uint8)
        parts = [webp(image) for image in pixels]
        stored |= {
            f"{name}_pixels": pixels,
            f"{name}_blob": np.frombuffer(b"".join(parts), np.uint8),
            f"{name}_offset": np.cumsum([0, *map(len, parts)]),
            f"{name}_label": rng.integers(0, 12, (2, 8, 12), dtype=np.uint8),
        }
    stored |= changes
    buffer = io.BytesIO()
    np.savez(buffer, **{k: v for k, v in stored.items() if not k.endswith("_pixels")})
    (home / "small.npz").write_bytes(buffer.getvalue())
    file = DataFile("small.npz", "a test", hashlib.sha256(buffer.getvalue()).hexdigest())
    return file, stored


def test_stored_scenes_come_back_as_they_were(home: Path) -> None:
    file, stored = small_camvid(home)
    found = label_maps.camvid(8, 12, 8, 12, file=file)
    assert list(found) == ["train", "val", "test"]
    for name, part in found.items():
        assert part.pixels.permute(0, 2, 3, 1).numpy().tolist() == stored[f"{name}_pixels"].tolist()
        assert part.labels.numpy().tolist() == stored[f"{name}_label"].tolist()
        assert (part.ignore, part.classes) == (11, 11)


def test_images_are_averaged_not_skipped(home: Path) -> None:
    stripes = np.zeros((1, 8, 12, 3), dtype=np.uint8)
    stripes[:, :, ::2] = 200  # every other column, which skipping would take or leave whole
    part = webp(stripes[0])
    file, _ = small_camvid(
        home,
        val_blob=np.frombuffer(part, np.uint8),
        val_offset=np.array([0, len(part)]),
        val_label=np.zeros((1, 8, 12), dtype=np.uint8),
    )
    (val,) = label_maps.camvid(4, 6, 4, 6, splits=["val"], file=file).values()
    assert val.pixels.shape == (1, 3, 4, 6)
    assert (val.pixels.float() - 100).abs().max() < 20


def test_archive_that_does_not_fit_is_refused(home: Path) -> None:
    file, stored = small_camvid(home, val_label=np.zeros((3, 8, 12), dtype=np.uint8))
    assert len(stored["val_offset"]) == 3
    with pytest.raises(ValueError, match="offsets"):
        label_maps.camvid(8, 12, 8, 12, file=file)
    with pytest.raises(ValueError, match="all"):
        label_maps.camvid(splits=["all"], file=file)


def test_missing_camvid_names_source_and_remedy(home: Path) -> None:
    with pytest.raises(MissingDataError, match="camvid_360x480"):
        label_maps.camvid()


def test_majority_agrees_with_counting_one_by_one() -> None:
    labels = torch.randint(0, 3, (5, 6, 8)).byte()  # of three labels: ties are frequent
    found = label_maps.majority(labels, 3, 4, classes=3)
    for n, y, x in np.ndindex(5, 3, 4):
        votes = labels[n, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].flatten().bincount(minlength=3)
        assert int(found[n, y, x]) == votes.tolist().index(max(votes.tolist()))
    with pytest.raises(ValueError, match="blocks"):
        label_maps.majority(labels, 4, 4, classes=3)
    with pytest.raises(ValueError, match=r"\b2\b"):
        label_maps.majority(labels, 3, 4, classes=2)


# --- masks ----------------------------------------------------------------------------------------


def slow_boundaries(labels: torch.Tensor, within: int, ignore: int | None) -> torch.Tensor:
    """The definition, pixel by pixel."""
    height, width = labels.shape

    def differs(y: int, x: int, other_y: int, other_x: int) -> bool:
        if not (0 <= other_y < height and 0 <= other_x < width):
            return False
        a, b = int(labels[y, x]), int(labels[other_y, other_x])
        return a != b and ignore not in (a, b)

    edges = [
        (y, x)
        for y, x in np.ndindex(height, width)
        if any(differs(y, x, y + dy, x + dx) for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0)))
    ]
    marked = torch.zeros(height, width, dtype=torch.bool)
    for y, x in np.ndindex(height, width):
        near = any(max(abs(y - v), abs(x - u)) <= within for v, u in edges)
        marked[y, x] = near and int(labels[y, x]) != ignore
    return marked


@pytest.mark.parametrize("within", [0, 1, 2, 3])
@pytest.mark.parametrize("ignore", [None, 2])
def test_boundaries_agree_with_their_definition(within: int, ignore: int | None) -> None:
    coarse = torch.randint(0, 3, (4, 3, 4))
    labels = coarse.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2).byte()
    found = label_maps.boundaries(labels, within, ignore)
    expected = torch.stack([slow_boundaries(one, within, ignore) for one in labels])
    assert found.equal(expected)
    inside = label_maps.interior(labels, within, ignore)
    assert not (found & inside).any()
    known = torch.ones_like(found) if ignore is None else labels != ignore
    assert (found | inside).equal(known)


def test_ignored_pixels_make_no_boundary() -> None:
    labels = torch.tensor([[[0, 0, 9, 9, 1, 1]]])
    assert not label_maps.boundaries(labels, 2, ignore=9).any()
    assert label_maps.interior(labels, 2, ignore=9).tolist() == [
        [[True, True, False, False, True, True]]
    ]
    assert label_maps.boundaries(labels, 0).tolist() == [[[False, True, True, True, True, False]]]


def test_accuracy_and_iou_by_hand() -> None:
    labels = torch.tensor([[[0, 0, 0, 1, 3]]])
    predicted = torch.tensor([[[0, 0, 1, 1, 2]]])
    counts = label_maps.confusion(predicted, labels, 3, ignore=3)
    assert counts.tolist() == [[2, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert label_maps.pixel_accuracy(counts) == 0.75
    assert label_maps.mean_iou(counts) == pytest.approx((2 / 3 + 1 / 2) / 2)  # class 2 never occurs


# --- with the data --------------------------------------------------------------------------------


def test_camvid_is_read_at_the_networks_resolution() -> None:
    if label_maps.CAMVID_FILE.found is None:
        pytest.skip("the CamVid images are not in FFCP_DATA")
    (val,) = label_maps.camvid(splits=["val"]).values()
    assert val.pixels.shape == (101, 3, 180, 240)
    assert val.labels.shape == (101, 90, 120)
    sky, road = (val.labels == label for label in (0, 3))
    # Images and labels belong together: the sky is bright and above, the road is below.
    light = torch.nn.functional.avg_pool2d(val.inputs().mean(dim=1), 2)
    assert light[sky].mean() > light[road].mean() + 1
    rows = torch.arange(90)[None, :, None].expand_as(val.labels)
    assert rows[sky].float().mean() < 30 < 60 < rows[road].float().mean()
    assert float((val.labels == 11).float().mean()) == pytest.approx(0.0153, abs=1e-4)
