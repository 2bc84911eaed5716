"""The progress bar: drawn on a terminal alone, and not needed."""

from __future__ import annotations

import io
import sys

import pytest

from ffcp import extras


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps() -> None:
    with extras.progress(3, "learning") as step:
        for _ in range(3):
            step()


def test_a_bar_is_drawn_on_a_terminal_and_never_into_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(extras, "_DELAY", 0.0)
    for stream, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        steps()
        assert ("learning" in stream.getvalue()) == is_shown


def test_short_work_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    steps()
    assert stream.getvalue() == ""


def test_without_tqdm_the_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    steps()
