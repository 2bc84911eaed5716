"""Fuzz test of loading damaged calibration files: ``python -m benchmarks.fuzz``.

A calibrated predictor loads a damaged file of another calibration. Half of the mutations change
bytes; the other half change values and recompute the checksum, which tests the validators behind
it. A file must either raise ``ffcp.CalibrationFileError`` and leave predictor and model unchanged,
or give the intervals of the undamaged file. With a valid checksum, a changed but plausible score
may give other intervals; nothing else may.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import ffcp
from ffcp import files
from ffcp.conformal.columns import with_prefix
from ffcp.conformal.risk import LOSS_UNIT
from ffcp.network.model import fingerprint
from ffcp.persistence import learned_hash

FAULTS = ("wrong intervals", "touched models", "errors of another class", "lost calibrations")
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1e300, math.nan, math.inf, 2**70, "", "x", [], {}, [[1]], {"a": 1}, "0",
)  # fmt: skip
NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, 1e-300, 2.5)
LEARNED = "score."
POSITIVE = ("spread", "deviation", "unit", "typical")  # of what is learned
Tensors = dict[str, Tensor]


class Subject(NamedTuple):
    """A method under test: its constructor, its data, and the function that predicts."""

    make: Callable[[], Any]
    x: Tensor
    y: Tensor
    ask: Callable[[Any], Tensor]
    given: Mapping[str, Any] = MappingProxyType({})  # further arguments of calibrate

    def calibrated(self, rows: slice) -> Any:
        """Return it calibrated on some rows; lists among the arguments have one entry per row."""
        given = {n: v[rows] if isinstance(v, list) else v for n, v in self.given.items()}
        return self.make().calibrate(self.x[rows], self.y[rows], **given)


def subjects() -> dict[str, Subject]:
    torch.manual_seed(0)
    x, y, labels = torch.randn(90, 3), torch.randn(90), torch.randint(0, 5, (90,))
    body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    classes = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5))
    grown = torch.randn(400, 3)  # heteroscedastic, so that Auto selects a learned method
    noise = body(grown).detach()[:, 0] + 3 * (grown[:, 0] > 0) * torch.randn(400)
    images, maps = torch.randn(24, 2, 4, 4), torch.randint(0, 3, (24, 4, 4))
    segments = nn.Conv2d(2, 3, 1)

    def interval(predictor: Any) -> Tensor:
        result = predictor.predict_interval(x[:6], 0.2)
        return torch.cat([result.lower, result.upper])

    near = ffcp.kernels.Localizer("gaussian", on="input")
    halves = ["a", "b"] * 45
    few = {"rank_error": 0.1}
    return {
        "CP": Subject(lambda: ffcp.CP(body), x, y, interval),
        "FFCP": Subject(lambda: ffcp.FFCP(body, "0"), x, y, interval),
        "FFLCP": Subject(lambda: ffcp.FFLCP(body, "0", near), x, y, interval),
        "RAPS": Subject(
            lambda: ffcp.RAPS(classes, seed=3), x, labels,
            lambda p: p.predict_set(x[:20], 0.2, first_row=0).mask,
        ),
        "Learned": Subject(lambda: ffcp.Learned(body, seed=0), x, y, interval),
        "Learned, fit": Subject(
            lambda: ffcp.Learned(body, seed=0).fit(grown[:200], noise[:200]), x, y, interval
        ),
        "Learned, boosting": Subject(
            lambda: ffcp.Learned(body, learner="boosting", seed=0), grown, noise, interval
        ),
        "Auto": Subject(
            lambda: ffcp.Auto(body, calibrate_rows=30, seed=0), grown, noise, interval
        ),
        "FCP": Subject(lambda: ffcp.FCP(body, "0", steps=2), x, y, interval),
        "PixelSets": Subject(
            lambda: ffcp.segmentation.PixelSets(segments), images, maps,
            lambda p: p.predict_set(images[:3], 0.2).mask,
        ),
        "compressed": Subject(lambda: ffcp.CP(body), x, y, interval, few),
        "compressed groups": Subject(
            lambda: ffcp.CP(body), x, y,
            lambda p: p.predict_interval(x[:6], 0.2, groups=list(p.calibration.groups) * 3).upper,
            {**few, "groups": halves},
        ),
    }  # fmt: skip


def more_subjects() -> dict[str, Subject]:
    """Return calibrations of other kinds: weighted, by group, of losses."""
    torch.manual_seed(0)
    x, y, labels = torch.randn(120, 3), torch.randn(120), torch.randint(0, 3, (120,))
    body, classes = nn.Linear(3, 1), nn.Linear(3, 3)

    def tilted(x: Tensor) -> Tensor:
        return (0.3 * x[:, 0]).exp()

    def sides(x: Tensor) -> list[str]:
        return ["left" if one else "right" for one in (x[:, 0] < 0).tolist()]

    def interval(predictor: Any) -> Tensor:
        result = predictor.predict_interval(x[:6], 0.2)
        return torch.cat([result.lower, result.upper])

    learned, new = ffcp.calibrations.Weighted("learn"), {"new": torch.randn(90, 3) + 0.3}
    shift = ffcp.calibrations.LabelShift([0.5, 1.0, 2.0])
    return {
        "Weighted": Subject(
            lambda: ffcp.CP(body, calibration=ffcp.calibrations.Weighted(tilted)), x, y, interval
        ),
        "learned": Subject(lambda: ffcp.CP(body, calibration=learned, seed=0), x, y, interval, new),
        "groups": Subject(
            lambda: ffcp.CP(body, calibration=ffcp.calibrations.Mondrian(by=sides)), x, y, interval
        ),
        "ellipsoid": Subject(
            lambda: ffcp.CP(classes, joint="ellipsoid", seed=0), x, torch.randn(120, 3), interval
        ),
        "Conditional": Subject(
            lambda: ffcp.CP(body, calibration=ffcp.calibrations.Conditional("input"), seed=0),
            x, y, interval,
        ),
        "LabelShift": Subject(
            lambda: ffcp.LAC(classes, calibration=shift), x, labels,
            lambda p: p.predict_set(x[:20], 0.2).mask,
        ),
        "learned classes": Subject(
            lambda: ffcp.LAC(classes, calibration=ffcp.calibrations.LabelShift(), seed=0),
            x, labels,
            lambda p: p.predict_set(x[:20], 0.2).mask, new,
        ),
        "RiskControl": Subject(
            lambda: ffcp.RiskControl(classes, grid=[0.0, 0.5, 0.8, 1.0]), x,
            torch.rand(120, 3) < 0.5, lambda p: p.predict_set(x[:20], 0.3).sets,
        ),
        "tested risks": Subject(
            lambda: ffcp.RiskControl(
                classes, "wrong_answers", sets="answers", pac=0.9, grid=[0, 0.3, 0.4, 0.5, 0.8]
            ),
            x, labels, lambda p: p.certified(0.8).p_values,
        ),
        "VennAbers": Subject(
            lambda: ffcp.VennAbers(classes), x, labels, lambda p: p.predict_proba(x[:20])
        ),
    }  # fmt: skip


# -- damage ------------------------------------------------------------------------------------


def plain_damage(data: bytes, random: np.random.Generator) -> bytes:
    """Damage the bytes of a file."""
    kind, place = random.integers(6), int(random.integers(len(data)))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + random.bytes(int(random.integers(1, 9))) + data[place:]
    if kind == 2:
        return data[:place] + data[place + int(random.integers(1, 9)) :]
    many = bytearray(data)
    for _ in range(1 if kind < 5 else int(random.integers(2, 40))):
        many[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
    return bytes(many)


def sealed_damage(data: bytes, random: np.random.Generator) -> bytes:
    """Damage tensors or settings and recompute the checksum."""
    tensors = load(data)
    settings = json.loads(bytes(tensors.pop("_extra_state").numpy())[64:])
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    if random.random() < 0.5:
        damage_tensors(tensors, random)
        described = settings["compared"]["score"]  # that hash is recomputed too
        if settings["compared"]["learned"] is not None:
            hashed = learned_hash(described, with_prefix(LEARNED, tensors))
            settings["compared"]["learned"] = hashed
    elif random.random() < 0.95:
        settings = damaged_settings(settings, random)
    else:
        metadata["format"] = ("", "x", "ffcp-calibration-3")[random.integers(3)]
    sealed = {n: t for n, t in tensors.items() if n.startswith(("calibration.", LEARNED))}
    tensors["_extra_state"] = files.seal(settings, sealed)
    return save({n: t.contiguous() for n, t in tensors.items()}, metadata)


def damage_tensors(tensors: Tensors, random: np.random.Generator) -> None:
    filled = [name for name, tensor in tensors.items() if tensor.numel()]
    name = filled[random.integers(len(filled))]
    old = tensors[name]
    place = tuple(int(random.integers(size)) for size in old.shape)
    kind = random.integers(10)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        new = ("other", "calibration.other", "model.0.weight", "model.weight", "calibration.label")
        tensors[new[random.integers(len(new))]] = old.clone()
    elif kind == 2:
        types = (torch.float16, torch.float32, torch.int64, torch.uint8, torch.int32, torch.float64)
        tensors[name] = old.to(types[random.integers(len(types))])
    elif kind == 3:
        thirds = 3 if old.numel() % 3 == 0 else 1
        shapes = ((-1,), (1, -1), (-1, 1), (thirds, -1), (old.shape[0], -1, 1))
        tensors[name] = old.reshape(shapes[random.integers(len(shapes))])
    elif kind == 4:
        tensors[name] = old[: random.integers(len(old))]
    elif kind == 5:
        tensors[name] = torch.cat([old, old[-1:]])
    elif kind == 6:
        tensors[name] = old[torch.from_numpy(random.permutation(len(old)))]
    elif kind == 7:
        tensors[name] = ~old if old.dtype == torch.bool else -old
    elif kind == 8:
        flat = old.clone().reshape(-1).view(torch.uint8)
        flat[int(random.integers(len(flat)))] ^= 1 << int(random.integers(8))
        tensors[name] = flat.view(old.dtype).reshape(old.shape)
    else:
        new_value = torch.tensor(NUMBERS[random.integers(len(NUMBERS))], dtype=torch.float64)
        changed = old.clone()
        whole = not old.is_floating_point()
        # Converted first: what is too large for the type becomes infinite.
        changed[place] = int(random.integers(-9, 9)) if whole else new_value.to(old.dtype)
        tensors[name] = changed


def damaged_settings(settings: Any, random: np.random.Generator) -> Any:
    """Return settings with one value removed, replaced or added."""
    settings = copy.deepcopy(settings)
    spots = list(_spots(settings))
    holder, key = spots[random.integers(len(spots))]
    kind = random.random()
    if kind < 0.2:
        del holder[key]
    elif kind < 0.9:
        holder[key] = JUNK[random.integers(len(JUNK))]
    elif isinstance(holder, dict):
        holder["more"] = JUNK[random.integers(len(JUNK))]
    else:
        return JUNK[random.integers(len(JUNK))]
    return settings


def _spots(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _spots(value[key])


def could_be(tensors: Tensors, was: Tensors) -> bool:
    """Whether the tensors of a file are a plausible calibration of the same layout."""
    if {n: (t.dtype, t.shape) for n, t in tensors.items() if n != "_extra_state"} != {
        n: (t.dtype, t.shape) for n, t in was.items() if n != "_extra_state"
    }:
        return False
    for name, tensor in with_prefix(LEARNED, tensors).items():
        if not tensor.isfinite().all() or (name.endswith(POSITIVE) and not (tensor > 0).all()):
            return False
    if not is_forest(with_prefix(f"{LEARNED}learner.", tensors)):
        return False
    sums = tensors.get(f"{LEARNED}sums")  # of losses in [0, 1], in units
    counts = tensors.get(f"{LEARNED}counts", torch.zeros(1)).clamp_max(10_001)
    if sums is not None and not ((sums >= 0) & (sums <= counts * LOSS_UNIT)).all():
        return False
    if bool((counts > 10_000).any()):
        return False
    rows = tensors.get(f"{LEARNED}rows")  # hashes, in order
    if rows is not None and not (rows.diff() >= 0).all():
        return False
    described, original = _described(tensors), _described(was)
    # A number per column or class.
    now, then = described.get("learned") or [], original.get("learned")
    if isinstance(then, list) and not (len(now) == len(then) and all(map(_is_number, now))):
        return False
    if "calibration.labels" not in tensors:
        return could_be_rows(with_prefix("calibration.", tensors))
    labels = json.loads(bytes(tensors["calibration.labels"].numpy()))["labels"]
    parts = [with_prefix(f"calibration.{number}.", tensors) for number in range(len(labels))]
    return len(set(labels)) == len(labels) and all(map(could_be_rows, parts))


def could_be_rows(rows: Tensors) -> bool:
    """Whether rows are plausible for a calibration or one of its groups."""
    scores, weight = rows["scores"], rows.get("weight")
    if weight is not None and not bool((weight.isfinite() & (weight >= 0)).all()):
        return False
    if "pieces" in rows:
        return could_be_pieces(rows)
    if "label" in rows and scores.dim() == 2 and scores.shape[1] > 1:  # log odds of classes
        known = (rows["label"] >= 0) & (rows["label"] < scores.shape[1])
        return bool(scores.isfinite().all() and known.all())
    if weight is not None or "label" in rows:  # in the order of their rows
        return bool((scores >= 0).all())
    if scores.dim() == 2 and scores.shape[1] == 4:  # losses at four levels
        return bool(((scores >= 0) & (scores <= 1)).all() and (scores.diff(dim=1) <= 0).all())
    if scores.dim() == 2 and scores.shape[1] == 5:  # losses that are tested at five levels
        return bool(((scores == 0) | (scores == 1) | scores.isnan()).all())
    beside = [rows[name] for name in ("embedding", "features", "directions") if name in rows]
    if beside:  # scores lie as their rows do, in no order
        are_finite = all(bool(column.isfinite().all()) for column in (*beside, scores))
        return are_finite and bool((scores >= 0).all())
    if not scores.is_floating_point():
        return bool((scores >= 0).all() and scores.any(dim=1).all())
    in_order = bool((scores.diff(dim=0) >= 0).all())
    return in_order and bool((scores >= 0).all())


def could_be_pieces(tensors: Tensors) -> bool:
    """Whether the sorted numbers of a compressed calibration match its pieces."""
    scores, pieces = tensors["scores"], tensors["pieces"]
    weight, count, error = pieces.unbind(dim=2)
    if not bool((weight >= 1).all() and (count >= weight).all() and (error <= count).all()):
        return False
    sizes = -(-count // weight)
    in_order = all(
        bool((part.diff(dim=0) >= 0).all()) for part in scores.split(sizes[:, 0].tolist())
    )
    return in_order and int(sizes.sum()) == len(scores) and bool((scores >= 0).all())


def is_forest(learned: Tensors) -> bool:
    """Whether the trees of a learned forest, if any, lead every row to a leaf."""
    if "left" not in learned:
        return True
    own = torch.arange(learned["left"].shape[-1])
    leaf = (learned["left"] == own) & (learned["right"] == own)
    for way in (learned["left"], learned["right"]):
        if not bool((leaf | ((way > own) & (way < len(own)))).all()):
            return False
    columns = int(learned["columns"])
    return columns > 0 and bool(((learned["feature"] >= 0) & (learned["feature"] < columns)).all())


def _described(tensors: Tensors) -> dict[str, Any]:
    result = json.loads(bytes(tensors["_extra_state"].numpy())[64:])["calibration"]
    inner = result.get("inner", result) if isinstance(result, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_plain and math.isfinite(value)


# -- trial -------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> tuple[Any, ...]:
    return (
        fingerprint(model),
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )


def fuzz(subject: Subject, mutations: int, seed: int = 0) -> Counter[str]:
    """Load damaged files into a predictor; return the counts of outcomes."""
    counts: Counter[str] = Counter(dict.fromkeys(FAULTS, 0))
    half = len(subject.x) // 2
    saved, in_use = subject.calibrated(slice(half)), subject.calibrated(slice(half, None))
    right, mine, model = subject.ask(saved), subject.ask(in_use), state_of(in_use.model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        path = Path(folder) / "calibration.safetensors"
        saved.save(path)
        data = path.read_bytes()
        for number in range(mutations):
            random = np.random.default_rng([seed, number])
            is_sealed = bool(number % 2)
            damaged = (sealed_damage if is_sealed else plain_damage)(data, random)
            path.unlink()  # overwriting a file is slow on some disks
            path.write_bytes(damaged)
            victim = copy.copy(in_use)
            victim.__dict__["_modules"] = dict(in_use._modules)
            counts[trial(subject, victim, path, right, mine, is_sealed, data)] += 1
            counts["errors of another class"] += not is_made_or_refused(path, saved)
            counts["touched models"] += state_of(in_use.model) != model
    return counts


def is_made_or_refused(path: Path, saved: Any) -> bool:
    """Whether :func:`ffcp.load` refuses a damaged file or returns the right class."""
    model = saved.model.network if "network" in saved.model._modules else saved.model
    try:
        return type(ffcp.load(path, model)) is type(saved)
    except ffcp.CalibrationFileError:
        return True
    except Exception:
        return False


def trial(
    subject: Subject,
    victim: Any,
    path: Path,
    right: Tensor,
    mine: Tensor,
    is_sealed: bool,
    data: bytes,
) -> str:
    """Load one damaged file; return the outcome."""
    try:
        victim.load(path)
    except ffcp.CalibrationFileError as error:
        if str(path) not in str(error):
            return "errors of another class"
        return "refused" if torch.equal(subject.ask(victim), mine) else "lost calibrations"
    except Exception:
        return "errors of another class"
    changed = load(path.read_bytes())
    try:
        result = subject.ask(victim)
    except Exception as error:
        # A renamed group cannot be told from the original one.
        has_groups = "calibration.labels" in changed and "no calibration row" in str(error)
        return "another score" if is_sealed and has_groups else "lost calibrations"
    if torch.equal(result, right):
        return "harmless"
    return "another score" if is_sealed and could_be(changed, load(data)) else "wrong intervals"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=20_000, help="number for each predictor")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faults = 0
    for name, subject in {**subjects(), **more_subjects()}.items():
        counts = fuzz(subject, arguments.mutations, arguments.seed)
        faults += sum(counts[fault] for fault in FAULTS)
        print(f"{name:15}", ", ".join(f"{what} {n}" for what, n in sorted(counts.items())))
    if faults:
        raise SystemExit(f"{faults} faults")


if __name__ == "__main__":
    main()
