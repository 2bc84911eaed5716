"""Needs of several pieces become the needs of one pass."""

from __future__ import annotations

import pytest

from ffcp import Requires


def test_joined_needs_ask_for_what_either_asks_for() -> None:
    one, other = (
        Requires(norms=("a", "b"), values=("c",)),
        Requires(norms=("b", "d"), values=("c", "a")),
    )
    assert one.joined(other) == Requires(norms=("a", "b", "d"), values=("c", "a"))
    assert Requires().joined(Requires()) == Requires()


def test_the_kind_of_norm_is_that_of_the_piece_that_wants_norms() -> None:
    wants, silent = Requires(norms=("a",), norm=1, method="exact"), Requires(values=("b",))
    for joined in (wants.joined(silent), silent.joined(wants)):
        assert joined == Requires(("a",), ("b",), norm=1, method="exact")


@pytest.mark.parametrize("other", [{"norm": 1}, {"method": "exact"}, {"of": len}])
def test_different_kinds_of_norms_do_not_fit_into_one_pass(other: dict) -> None:
    (setting,) = other
    with pytest.raises(ValueError, match=setting):
        Requires(norms=("a",)).joined(Requires(norms=("b",), **other))
