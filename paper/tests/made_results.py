"""A folder of results as a run writes it, for the tests of its page; our numbers are made up."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from ffcp_paper.page.run_files import UNAVAILABLE
from ffcp_paper.tables import printed

NAMES = ("synthetic", "com", "fb1", "fb2", "meps19", "meps20", "star", "bio", "blog", "bike")
ATTACK = "<script>document.title = 'attacked'</script><img src=x onerror=alert(1)>"


def put(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def column(key: str, label: str, kind: str = "number", **more: object) -> dict[str, object]:
    return {"key": key, "label": label, "kind": kind, "source": None, **more}


def theirs(name: str, method: str, what: str) -> dict[str, float | None] | None:
    found = printed.value("regression_bands", row=name, method=method, column=what)
    if found is None:
        return None
    scale = 0.01 if what == "coverage" else 1
    sd = None if found.sd is None else found.sd * scale
    return {"mean": found.mean * scale, "sd": sd, "n": None}


def bands_row(i: int, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"data": name}
    for method in ("CP", "FFCP"):
        row[f"{method}_paper"] = theirs(name, method, "length")
    row["cover_paper"] = theirs(name, "FFCP", "coverage")
    if name == "blog":
        return {**row, "CP": None, "FFCP": None, "cover": None, "claim": None,
                "note": UNAVAILABLE}  # fmt: skip
    lengths = [1.5 + 0.37 * ((7 * i) % 10), 1.4 + 0.36 * ((7 * i) % 10) + 0.02 * i]
    row["CP"] = {"mean": lengths[0], "sd": 0.04, "n": 5}
    row["FFCP"] = {"mean": lengths[1], "sd": 0.05, "n": 5}
    row["cover"] = {"mean": 0.9 + 0.001 * (i - 4), "sd": 0.004, "n": 5}
    row["claim"] = lengths[1] < lengths[0]
    return row


def bands_table() -> dict[str, Any]:
    rows = [bands_row(i, name) for i, name in enumerate(NAMES)]
    rows[3]["CP"] = float("inf")
    rows[5]["FFCP"] = {"mean": float("nan"), "sd": None, "n": 5}
    held = sum(row["claim"] is True for row in rows)
    return {
        "name": "bands",
        "title": "Table 2. Bands of CP and FFCP",
        "claim": "FFCP's bands are shorter than CP's and cover as much.",
        "alpha": 0.1,
        "verdict": {"held": held, "of": 9, "text": f"FFCP was shorter on {held} of 9 data sets."},
        "columns": [
            column("data", "data set", "text"),
            column("CP", "CP length", digits=2, source="ours"),
            column("CP_paper", "CP length", digits=2, source="paper"),
            column("FFCP", "FFCP length", digits=2, source="ours"),
            column("FFCP_paper", "FFCP length", digits=2, source="paper"),
            column("cover", "FFCP coverage", digits=1, percent=True, source="ours"),
            column("cover_paper", "FFCP coverage", digits=1, percent=True, source="paper"),
            column("claim", "FFCP shorter", "claim"),
        ],
        "rows": rows,
        "notes": ["Lengths are in units of the scaled target.", "blog needs a file to be fetched."],
    }


def simple_table(name: str, title: str, claim: str, held: int, of: int) -> dict[str, Any]:
    text = f"It held on {held} of {of}." if of else "No data was there to check it."
    return {
        "name": name,
        "title": title,
        "claim": claim,
        "alpha": None,
        "verdict": {"held": held, "of": of, "text": text},
        "columns": [
            column("data", "data set", "text"),
            column("speedup", "times faster", digits=0, source="ours"),
            column("claim", "claim", "claim"),
        ],
        "rows": [
            {"data": f"{data} {k}", "speedup": 10.0 * k, "claim": i < held if of else None}
            for i, (data, k) in enumerate((d, k) for d in NAMES[:6] for k in range(1, 6))
        ],
        "notes": [],
    }


TABLES = (
    bands_table(),
    simple_table("times", "Table 1. Running time", "FFCP is 50 times faster than FCP.", 30, 30),
    simple_table("groups", "Table 4. Worst group", "FFLCP covers the worst group best.", 0, 30),
    simple_table("labels", "Table 3. Label sets", "FFRAPS's sets are smaller.", 0, 0),
)

HELD: int = TABLES[0]["verdict"]["held"]


def write_folder(folder: Path, **changes: object) -> Path:
    settings = {
        "command": "ffcp-paper reproduce --seeds 5 --out results",
        "seeds": 5,
        "quick": True,
        "versions": {"ffcp": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "python": "3.11.2"},
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 8, "memory_gb": 15.6},
        "started": "2024-05-01T12:30:00+00:00",
        "seconds": 4210.0,
        "earlier": [],
        "tables": [table["name"] for table in TABLES],
        "figures": ["lengths", "times", "gone"],
        **changes,
    }
    put(folder / "settings.json", settings)
    for table in TABLES:
        put(folder / "tables" / f"{table['name']}.json", table)
    for name in ("lengths", "times", "gone"):
        about = {
            "title": f"Figure of {name}",
            "caption": "Each point is a data set; the line is where both methods are equal.",
            "alt": f"A scatter plot of {name}, most points under the diagonal.",
        }
        put(folder / "figures" / f"{name}.json", about)
    draw(folder / "figures")
    return folder


def draw(folder: Path) -> None:
    from matplotlib.figure import Figure

    for name, suffixes in (("lengths", ("svg", "png")), ("times", ("png",))):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 5], [0, 5], color="0.7")
        axes.scatter([1, 2, 3, 4], [0.8, 1.9, 3.2, 3.1])
        axes.set(xlabel="CP", ylabel="FFCP")
        for suffix in suffixes:
            figure.savefig(folder / f"{name}.{suffix}")


def change_table(folder: Path, **changes: object) -> Path:
    write_folder(folder, tables=["bands"], figures=[])
    put(folder / "tables" / "bands.json", {**bands_table(), **changes})
    return folder


def plain(text: str) -> str:
    """Return the words that a page shows."""
    body = re.sub(r"(?s)<(style|script)>.*?</\1>", " ", text)
    body = re.sub(r"</?(span|strong|em|time|code|a)\b[^>]*>", "", body)  # inside a line
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())
