"""The columns of the paper's tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ffcp_paper.tables.rows import RUNTIMES, method_title


@dataclass(frozen=True)
class Column:
    """A column: its label, and the format of its values."""

    key: str
    label: str
    kind: str = "text"
    digits: int | None = None
    percent: bool | None = None
    source: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, without unset entries."""
        plain: dict[str, Any] = {"key": self.key, "label": self.label, "kind": self.kind}
        if self.digits is not None:
            plain["digits"] = self.digits
        if self.percent is not None:
            plain["percent"] = self.percent
        return {**plain, "source": self.source}


_DATA, _METHOD, _SPLIT = (
    Column("data", "data"),
    Column("method", "method"),
    Column("split", "split"),
)
_IN_BALL = Column("feature_coverage", "in feature space", "number", 1, True, "ours")
_HOLDS = Column("holds", "claim holds", "claim")
_LAWFUL = Column("lawful", "within law", "claim")


def _pair(key: str, label: str, digits: int, percent: bool | None = None) -> list[Column]:
    """Return a column of ours and the paper's beside it."""
    ours = Column(key, label, "number", digits, percent, "ours")
    return [ours, replace(ours, key=f"{key}_paper", label="paper", source="paper")]


def _band_columns(base: str, *, ball: bool = False, levels: bool = False) -> list[Column]:
    return [
        _DATA,
        *([Column("levels", "levels")] if levels else []),
        _METHOD,
        _SPLIT,
        *_pair("coverage", "coverage", 1, True),
        *([_IN_BALL] if ball else []),
        *_pair("length", "length", 3),
        _LAWFUL,
        Column("shorter", f"shorter than {method_title(base)}", "claim"),
        _HOLDS,
    ]


_SQUARES = {
    "distance": "FFCP |Q - s|",
    "scaled": "in y",
    "shortfall": "split CP Q - s",
    "largest": "largest norm",
    "gap": "Q gap",
}
_CONDITIONS = {"checked": "as checked", "in_unit": "in y", "stated": "as stated"}


def columns_of(name: str) -> list[Column]:
    """List the columns of a table."""
    if name in ("ffcp_runtime", "ffcqr_runtime"):
        plain, slow, fast = RUNTIMES[name].names
        seconds = [c for of in (plain, slow, fast) for c in _pair(of, f"{method_title(of)} s", 4)]
        ours, paper = _pair("speedup", "times faster", 1)
        ends = (
            replace(ours, key=f"speedup_{e}", label=w) for e, w in (("low", "from"), ("high", "to"))
        )
        return [_DATA, *seconds, ours, *ends, paper, _HOLDS]
    if name == "square_conditions":
        return [
            _DATA,
            _SPLIT,
            *(Column(key, label, "number", 3, None, "ours") for key, label in _SQUARES.items()),
            *(Column(key, label, "claim") for key, label in _CONDITIONS.items()),
            Column("ratio", "length / split CP", "number", 2, None, "ours"),
            _HOLDS,
        ]
    if name in ("group_coverage_cp", "group_coverage_lcp"):
        overall = Column("coverage", "coverage", "number", 1, True, "ours")
        worst = _pair("group_coverage", "worst group", 1, True)
        if name == "group_coverage_lcp":  # a localized threshold has another law
            return [_DATA, _METHOD, _SPLIT, *worst, overall, _HOLDS]
        return [_DATA, _METHOD, _SPLIT, *worst, overall, _IN_BALL, _LAWFUL, _HOLDS]
    if name == "raps_imagenet":
        accuracy = [*_pair("top1", "top-1", 1, True), *_pair("top5", "top-5", 1, True)]
        return [
            Column("network", "network"),
            _METHOD,
            *accuracy,
            *_pair("coverage", "coverage", 1, True),
            *_pair("length", "labels", 2),
            _LAWFUL,
            _HOLDS,
        ]
    ball = name in ("regression_bands", "ffcqr_bands")
    base = "CQR" if name == "ffcqr_bands" else "CP"
    return _band_columns(base, ball=ball, levels=name == "ffcqr_bands")
