"""Label sets divided over workers, saved and loaded."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import ffcp
from tests.classification.material import METHODS, TUNED, K, X, Y, network
from tests.core import calibration_shares


def test_workers_merge(make) -> None:
    for conditional in (False, True):
        settings = {"class_conditional": conditional}
        merged, parts = make(network(), **settings), []
        for seed, rows in enumerate((slice(0, 100), slice(100, 300))):
            part = make(network(), seed=seed, **settings).calibrate(X[rows], Y[rows])
            parts.append(part.calibration.scores.sort(dim=0).values)
            merged.merge(part)
        expected = torch.cat(parts).sort(dim=0).values
        assert torch.equal(merged.calibration.scores.sort(dim=0).values, expected)
        assert merged.classes == K


def test_workers_that_do_not_draw_give_what_one_gives() -> None:
    whole = ffcp.LAC(network()).calibrate(X, Y)
    merged = ffcp.LAC(network())
    for rows in (slice(0, 100), slice(100, 300)):
        merged.merge(ffcp.LAC(network()).calibrate(X[rows], Y[rows]))
    # Another batch is another rounding of the model.
    torch.testing.assert_close(
        merged.calibration.scores, whole.calibration.scores, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("randomized", [True, False])
def test_workers_of_a_method_that_draws_need_their_own_seeds(randomized: bool) -> None:
    def aps(seed: int) -> ffcp.APS:
        return ffcp.APS(network(), seed=seed, randomized=randomized).calibrate(X, Y)

    one, two, three = map(aps, (0, 1, 0))
    with pytest.raises(ValueError, match="seed 0"):
        one.merge(three)
    assert len(one.merge(two).calibration) == 600
    with pytest.raises(ValueError, match="seed"):
        two.merge(one)
    with pytest.raises(ValueError, match="seed 1"):  # its numbers came with the merge
        one.merge(aps(1))


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (lambda: ffcp.RAPS(network(), lam=0.2, seed=1), ValueError, "lam"),
        (lambda: ffcp.APS(network(), seed=1), ValueError, r"\baps\b"),
        (lambda: ffcp.RAPS(network(), temperature=2.0, seed=1), ValueError, "temperature"),
        (lambda: ffcp.RAPS(network(), randomized=False), ValueError, "randomized"),
        (
            lambda: ffcp.RAPS(network(), class_conditional=True, seed=1),
            ValueError,
            "ByLabel",
        ),
        (lambda: ffcp.RAPS(network(7), seed=1), ValueError, "weights"),
    ],
)
def test_what_cannot_be_merged(other, error: type, message: str) -> None:
    mine = ffcp.RAPS(network()).calibrate(X, Y)
    with pytest.raises(error, match=message):
        mine.merge(other().calibrate(X, Y))
    assert len(mine.calibration) == 300


def test_an_empty_predictor_goes_on_where_the_merged_one_stopped() -> None:
    whole = ffcp.APS(network(), seed=0).calibrate(X, Y).calibrate(X[:50], Y[:50], update=True)
    merged = ffcp.APS(network(), seed=0).merge(ffcp.APS(network(), seed=0).calibrate(X, Y))
    merged.calibrate(X[:50], Y[:50], update=True)
    assert torch.equal(merged.calibration.scores, whole.calibration.scores)


def test_random_numbers_are_not_those_that_divide_the_rows() -> None:
    # numpy: SeedSequence([seed, 0]) is SeedSequence(seed).
    divides = torch.from_numpy(np.random.default_rng(0).random(100))
    assert not torch.isin(calibration_shares(100), divides).any()


def test_merging_nothing_itself_or_something_else() -> None:
    mine = ffcp.RAPS(network()).calibrate(X, Y)
    with pytest.raises(ValueError, match="calibrate"):
        mine.merge(ffcp.RAPS(network(), seed=3))
    with pytest.raises(ValueError, match="itself"):
        mine.merge(mine)
    with pytest.raises(ValueError, match="ScaledScore"):
        mine.merge(ffcp.CP(network()).calibrate(X, torch.zeros(len(X), 5)))


@pytest.mark.long
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("kind", [*METHODS, *TUNED])
def test_saved_and_loaded(kind: str, conditional: bool, tmp_path) -> None:
    make = {**METHODS, **TUNED}[kind]
    settings = {"class_conditional": conditional}
    predictor = make(network(), **settings).calibrate(X, Y)
    predictor.save(tmp_path / "sets.safetensors")
    loaded = make(network(), **settings).load(tmp_path / "sets.safetensors")
    copied = make(network(), **settings)
    copied.load_state_dict(predictor.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        expected = predictor.predict_set(X, first_row=0).mask
        for other in (loaded, copied):
            assert other.choice == predictor.choice
            assert other.classes == K
            assert torch.equal(other.predict_set(X, first_row=0).mask, expected)
            # Random numbers go on where the calibration left off.
            other.calibrate(X[:9], Y[:9], update=True)
    predictor.calibrate(X[:9], Y[:9], update=True)
    assert torch.equal(loaded.calibration.scores, predictor.calibration.scores)
    assert torch.equal(copied.calibration.scores, predictor.calibration.scores)


def test_loading_into_other_settings_is_refused_and_changes_nothing(tmp_path) -> None:
    path = tmp_path / "sets.safetensors"
    saved = ffcp.RAPS(network(), tune="size").calibrate(X, Y)
    saved.save(path)
    given = ffcp.RAPS(network(), lam=0.7, tune="size")
    with pytest.raises(ValueError, match="lam"):
        given.load(path)
    assert (given.kreg, given.choice, len(given.calibration)) == (None, None, 0)
    with pytest.raises(ValueError, match=r"\braps\b"):
        ffcp.APS(network()).load(path)
    other = network()
    nn.init.ones_(other[0].weight)
    with pytest.raises(ValueError, match="weights"):
        ffcp.RAPS(other, tune="size").load(path)
    with pytest.raises(ValueError, match="settings"):
        ffcp.RAPS(network(), tune="size").load_state_dict(ffcp.RAPS(network()).state_dict() | {
            "_extra_state": ffcp.FFRAPS(network()).get_extra_state()
        })  # fmt: skip


def test_seeds_survive_saving(tmp_path) -> None:
    path = tmp_path / "sets.safetensors"
    ffcp.APS(network(), seed=4).calibrate(X, Y).save(path)
    loaded = ffcp.APS(network(), seed=5).load(path)
    with pytest.raises(ValueError, match="seed 4"):
        loaded.merge(ffcp.APS(network(), seed=4).calibrate(X, Y))


@pytest.mark.parametrize("seed", [None, 2**64 - 1, 10**30])
def test_seeds_of_any_size_can_be_saved(seed: int | None, tmp_path) -> None:
    predictor = ffcp.APS(network(), seed=seed).calibrate(X, Y)
    other = ffcp.APS(network(), seed=2**64 - 2).calibrate(X, Y)  # as the system may give
    predictor.merge(other)
    predictor.save(tmp_path / "sets.safetensors")
    loaded = ffcp.load(tmp_path / "sets.safetensors", predictor.model)
    with pytest.raises(ValueError, match=str(2**64 - 2)):
        loaded.merge(ffcp.APS(network(), seed=2**64 - 2).calibrate(X, Y))
    for each in (predictor, loaded):
        each.calibrate(X[:9], Y[:9], update=True)
    if seed is not None:  # else each goes on with numbers of its own
        assert torch.equal(loaded.calibration.scores, predictor.calibration.scores)


def test_numpy_settings_can_be_saved(tmp_path) -> None:
    predictor = ffcp.RAPS(network(), lam=np.float32(0.25), kreg=np.int64(2)).calibrate(X, Y)
    predictor.save(tmp_path / "sets.safetensors")
    assert ffcp.RAPS(network(), lam=0.25, kreg=2).load(tmp_path / "sets.safetensors").kreg == 2


def test_repr_shows_settings_and_points() -> None:
    shown = repr(ffcp.RAPS(network(), lam=0.3).calibrate(X, Y))
    assert "lam=0.3, kreg=5" in shown
    assert "300" in shown
