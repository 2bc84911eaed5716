"""The paper's figures with our data, each written as SVG, PNG and JSON with its texts.

A figure is a function from :class:`Request` to :class:`Drawn`; :data:`FIGURES` lists them and
:func:`write` writes them into a folder, where :mod:`ffcp_paper.page.report` finds them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffcp_paper.data.files import DataFile
from ffcp_paper.experiments import segmentation
from ffcp_paper.experiments.tasks import Settings
from ffcp_paper.ffcp_internals import put
from ffcp_paper.figures.band_plots import SEGMENTATION, band_lengths, overview
from ffcp_paper.figures.drawing import Drawn, Request, default_data
from ffcp_paper.figures.score_plots import score_histograms, scores_fcp_ffcp

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[float, float, str], None]  # done, total, and what is being done

#: The figures by name, in the order of the page.
FIGURES: dict[str, Callable[[Request], Drawn]] = {
    "overview": overview,
    "scores_fcp_ffcp": scores_fcp_ffcp,
    "score_histograms": score_histograms,
    **{f"{SEGMENTATION}{name}": partial(band_lengths, name) for name in segmentation.EXPERIMENTS},
}
DPI = 150
_SECONDS = {
    f"{SEGMENTATION}shapes": 80.0,
    f"{SEGMENTATION}camvid": 480.0,
    f"{SEGMENTATION}deeplab": 120.0,
}
_QUICK_NOTE = "A quick run with few rows and epochs, too little to judge the paper."


def write(
    names: Sequence[str] = (),
    folder: str | Path = "reproduced",
    settings: Settings | None = None,
    progress: Progress = lambda done, total, text: None,
) -> list[str]:
    """Draw figures and write each as SVG, PNG and JSON, every file atomically.

    Parameters
    ----------
    names
        Some of :data:`FIGURES`; those :func:`available_figures` if empty.
    folder
        Where to write: ``figures/NAME.svg``, ``figures/NAME.png`` and ``figures/NAME.json``.
    settings
        Size of the run, as for the tables, whose networks are used.
    progress
        Called with the estimated seconds done and in total, and a description.

    Returns
    -------
    list of str
        The names of the figures that were written.

    Raises
    ------
    ValueError
        If a name is unknown.

    Examples
    --------
    >>> write(["overview"], "somewhere")  # doctest: +SKIP
    ['overview']
    """
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ValueError(f"unknown figure {unknown[0]!r}: choose from {', '.join(FIGURES)}")
    chosen = Settings() if settings is None else settings
    wanted = [name for name in FIGURES if name in names] if names else available_figures(chosen)
    total, done = sum(map(cost, wanted)), 0.0
    for name in wanted:

        def report(share: float, text: str, name: str = name, done: float = done) -> None:
            progress(done + min(1.0, share) * cost(name), total, text)

        drawn = FIGURES[name](Request(chosen, default_data(chosen), report=report))
        if not name.startswith(SEGMENTATION) and chosen.rows is not None:
            drawn = replace(drawn, caption=f"{drawn.caption} {_QUICK_NOTE}")
        save(name, drawn, Path(folder))
        done += cost(name)
        progress(done, total, name)
    return wanted


def available_figures(settings: Settings) -> list[str]:
    """List the figures that can be drawn; a quick run leaves out segmentation, which takes long.

    >>> available_figures(Settings(rows=2000))
    ['overview', 'scores_fcp_ffcp', 'score_histograms']
    """
    return [
        name
        for name in FIGURES
        if not name.startswith(SEGMENTATION) or (settings.rows is None and not missing(name))
    ]


def missing(name: str) -> list[DataFile]:
    """List the missing files that a figure needs."""
    wanted = segmentation.FILES.get(name.removeprefix(SEGMENTATION), ())
    return [file for file in wanted if file.found is None]


def cost(name: str) -> float:
    """Return a rough estimate of the seconds that a figure takes with an empty cache.

    >>> cost("overview") < cost("segmentation_camvid")
    True
    """
    return _SECONDS.get(name, 10.0)


def save(name: str, drawn: Drawn, folder: Path) -> list[Path]:
    """Write one figure into ``folder/figures``; return the files."""
    words = {"title": drawn.title, "caption": drawn.caption, "alt": drawn.alt}
    contents = {
        ".svg": _rendered(drawn.figure, "svg"),
        ".png": _rendered(drawn.figure, "png"),
        # JSON last: if it is there, the others are too.
        ".json": (json.dumps(words, indent=1, ensure_ascii=False) + "\n").encode(),
    }
    places = []
    for suffix, content in contents.items():
        place = folder / "figures" / f"{name}{suffix}"
        put(place, content)
        places.append(place)
    return places


def _rendered(figure: Figure, kind: str) -> bytes:
    import matplotlib

    out = io.BytesIO()
    # Text stays text, for search and screen readers; equal figures give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ffcp"}):
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(out, format=kind, dpi=DPI, metadata=metadata)
    return out.getvalue()
