"""``ffcp fit`` beside what users of other libraries would pick: ``python -m benchmarks.tables``.

Same rows for all: those that train (of which ffcp lets some stop its training), those that
calibrate, those that test. Targets are divided by the mean absolute training target. Nobody's
bands are cut. Every data set and seed is kept in the file of results when it is done; a run that
is stopped goes on where it was.

The peers need an environment of their own:

    python -m venv peers && peers/bin/pip install 'mapie==1.6.*' 'crepes==0.9.*'
    python -m benchmarks.tables --peers peers/bin/python --data star com bike --seeds 100 101
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ffcp import metrics, tables
from ffcp.tables import dividing
from ffcp_paper import datasets

ALPHA = 0.1
DATA = ("star", "com", "bike", "bio", "synthetic", "fb1", "blog")
OURS = "ffcp fit"
Array = np.ndarray[Any, Any]


def judged(ends: Array, y: Array, seconds: float) -> dict[str, float]:
    band = (torch.from_numpy(ends[:, 0].copy()), torch.from_numpy(ends[:, 1].copy()))
    target = torch.from_numpy(y)
    return {
        "score": float(metrics.interval_score(band, target, ALPHA)),
        "length": float(metrics.mean_length(band)),
        "coverage": float(metrics.coverage(band, target)),
        "worst third": float(metrics.group_coverage(band, target).worst),
        "seconds": seconds,
    }


def one(name: str, seed: int, minutes: float, peers: str | None) -> dict[str, dict[str, float]]:
    data = datasets.load(name, seed)
    frame = pd.DataFrame(
        data.x.astype(np.float64), columns=[f"c{n}" for n in range(data.x.shape[1])]
    )
    parts = dividing.divide(len(frame), ALPHA, seed, crossing=True)
    learned = np.concatenate([parts.train, parts.stop])
    y = data.y / np.abs(data.y[learned]).mean()
    frame["target"] = y
    start = time.perf_counter()
    fitted = tables.fit(frame, "target", alpha=ALPHA, minutes=minutes, seed=seed)
    bands = fitted.predict(frame.iloc[parts.test])
    ends = bands[["lower", "upper"]].to_numpy()
    result = {OURS: judged(ends, y[parts.test], time.perf_counter() - start)}
    if peers is not None:
        x = data.x.astype(np.float64)
        given = {"train": learned, "cal": parts.calibrate, "test": parts.test}
        arrays = {f"x_{part}": x[rows] for part, rows in given.items()}
        arrays |= {f"y_{part}": y[rows] for part, rows in given.items()}
        result |= theirs(arrays, y[parts.test], seed, peers)
    return result


def theirs(
    arrays: dict[str, Array], y: Array, seed: int, peers: str
) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "rows.npz", Path(folder) / "bands.npz"
        np.savez(source, **arrays)  # type: ignore[arg-type]
        script = Path(__file__).with_name("tables_peers.py")
        subprocess.run(
            [peers, str(script), str(source), str(out), str(ALPHA), str(seed)], check=True
        )
        with np.load(out) as result:
            return {
                name: judged(result[name], y, float(result[f"seconds {name}"]))
                for name in result.files
                if not name.startswith("seconds ")
            }


def kept(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["data"], line["seed"]): line["methods"] for line in lines}


def show(results: dict[tuple[str, int], dict[str, Any]], names: Iterable[str]) -> str:
    """Write a table, means over seeds; in bold the best mean interval score of a data set."""
    lines = [
        "| data (seeds) | method | interval score | length | coverage | worst third | seconds |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name in names:
        runs = [methods for (data, _), methods in results.items() if data == name]
        if not runs:
            continue
        methods = [method for method in runs[0] if all(method in run for run in runs)]
        means = {
            method: {
                key: float(np.mean([run[method][key] for run in runs])) for key in runs[0][OURS]
            }
            for method in methods
        }
        best = min(methods, key=lambda method: means[method]["score"])
        for method in methods:
            mean = means[method]
            score = f"{mean['score']:.3g}"
            score = f"**{score}**" if method == best else score
            lines.append(
                f"| {name} ({len(runs)}) | {method} | {score} "
                f"| {mean['length']:.3g} | {mean['coverage']:.1%} | {mean['worst third']:.1%} "
                f"| {mean['seconds']:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", nargs="+", default=list(DATA))
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--peers", help="the python of an environment with MAPIE and crepes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks_tables.jsonl"))
    asked = parser.parse_args()
    results = kept(asked.out)
    for name in asked.data:
        for seed in asked.seeds:
            if (name, seed) in results:
                continue
            results[name, seed] = one(name, seed, asked.minutes, asked.peers)
            line = {"data": name, "seed": seed, "minutes": asked.minutes}
            with asked.out.open("a") as file:
                file.write(json.dumps({**line, "methods": results[name, seed]}) + "\n")
            print(show({(name, seed): results[name, seed]}, [name]), flush=True)
    print(show(results, asked.data))


if __name__ == "__main__":
    main()
