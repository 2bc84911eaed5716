"""Four processes calibrate together: all end with the same, as valid as that of one process."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ffcp
from ffcp.conformal.rank import conformal_rank
from ffcp.distributed.sampling import Share
from tests.conftest import normal, small_mlp
from tests.distributed import scenes
from tests.distributed.scenes import GROUPS, METHODS, UNEVEN, X, Y

SELECTING = ["choice", "Learned", "FFLCP", "LCP", "shift", "RAPS tuned", "Auto"]
SELECTING += ["directions", "ellipsoid"]
ROOT = Path(__file__).parents[2]
FAILS = {  # a word of the message
    "broken": "OSError",
    "broken everywhere": "OSError",
    "not a number": "rank 2",
    "other weights": "weights",
    "other settings": "settings",
    "all rows in all ranks": "rank 1",
    "no rows": "rows",
    "same rank": "rank=",
    "other replicas": "num_replicas=",
    "other seeds": "seed",
    "other calibrations": "update=True",
    "compressed localized": "Local",
}


def ended(folder: Path, *more: str, patience: float = 600) -> list[int]:
    """Start four processes, which meet in a folder; give how each of them ended."""
    call = [sys.executable, "-m", "tests.distributed.worker", str(folder)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(4):
            said = stack.enter_context((folder / f"said {rank}").open("wb"))
            run = [*call, str(rank), "4", *more]
            processes.append(subprocess.Popen(run, cwd=ROOT, stdout=said, stderr=said))
            stack.callback(processes[-1].kill)
        return [process.wait(patience) for process in processes]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Play all scenes once, in four processes; give what each of them found."""
    folder = tmp_path_factory.mktemp("ranks")
    codes = ended(folder)
    assert codes == [0] * 4, [(folder / f"said {rank}").read_text() for rank in range(4)]
    return [torch.load(folder / f"results {rank}", weights_only=False) for rank in range(4)]


def points_of(played: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """Give the points that all four have; they are the same to the last bit."""
    files = [found[name][0] for found in played]
    assert isinstance(files[0], bytes), files
    assert all(file == files[0] for file in files)
    points: dict[str, torch.Tensor] = played[0][name][1]
    return points


def scores_of(played: list[dict[str, Any]], name: str) -> torch.Tensor:
    """Return the scores that all four have, of all groups."""
    points = points_of(played, name)
    return torch.cat([tensor for kind, tensor in points.items() if kind.endswith("scores")])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, "pixels", "one rank", "uniform"])
def test_all_ranks_end_with_the_same_calibration_to_the_last_bit(
    played: list[dict[str, Any]], name: str
) -> None:
    assert len(scores_of(played, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("CP", "two outputs", "groups", "weights", "FCP", "by class", "risk"),
        *("VennAbers", "two classes", "conditional"),
    ],
)
def test_scores_are_those_of_one_process(played: list[dict[str, Any]], name: str) -> None:
    make, y, more = METHODS[name]
    alone = make().calibrate(X, y, **more).calibration.state()
    for kind, values in points_of(played, name).items():
        if values.dtype == torch.float64 and kind == "scores" and name != "groups":
            torch.testing.assert_close(values, alone[kind])  # rounded by batches of another size
        elif name != "groups":
            assert values.shape == alone[kind].shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["groups", "padded groups"])
def test_groups_keep_their_points(played: list[dict[str, Any]], name: str) -> None:
    points = points_of(played, name)
    alone = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS).calibration
    together = alone.with_state(points)
    assert together.groups == alone.groups
    for label, part in together.parts.items():
        torch.testing.assert_close(part.scores, alone.parts[label].scores)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", SELECTING)
def test_the_first_rank_selects_on_rows_of_its_own_that_do_not_calibrate(
    played: list[dict[str, Any]], name: str
) -> None:
    make, y, more = METHODS[name]
    first = make().calibrate(X[: UNEVEN[0]], y[: UNEVEN[0]], **more)
    assert len(scores_of(played, name)) == len(first.calibration) + sum(UNEVEN[1:])
    assert len(first.calibration) < UNEVEN[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_a_rank_without_rows_selects_nothing(played: list[dict[str, Any]]) -> None:
    alone = METHODS["choice"][0]().calibrate(X, Y).calibration.scores
    torch.testing.assert_close(scores_of(played, "one rank"), alone)
    for name in ("fitted", "CP"):
        assert len(scores_of(played, name)) == 1001


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", ["CP", "choice", "Learned", "FFLCP", "LCP", "Auto"])
def test_intervals_of_many_ranks_cover(
    played: list[dict[str, Any]], name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(played[0][name][0])
    predictor = METHODS[name][0]().load(tmp_path / "file")
    x = normal(4000, 4, seed=10)
    y = 3 * (0.2 + x[:, 0].abs()) * normal(4000, seed=11)
    inside = int(predictor.predict_interval(x, alpha=0.1).contains(y).sum())
    n = len(predictor.calibration)
    k = conformal_rank(n, 0.1)
    law = stats.betabinom(4000, k, n + 1 - k)  # of one threshold; localized ones are near it
    assert law.ppf(1e-6) <= inside <= law.ppf(1 - 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "padded in order", "padded by batch"])
def test_rows_that_a_sampler_repeats_are_not_counted_twice(
    played: list[dict[str, Any]], name: str
) -> None:
    alone = ffcp.CP(small_mlp()).calibrate(X, Y).calibration.scores
    torch.testing.assert_close(scores_of(played, name), alone)


@pytest.mark.slow
def test_few_rows_and_those_that_are_dropped_are_counted_as_they_are(
    played: list[dict[str, Any]],
) -> None:
    assert len(scores_of(played, "more ranks than rows")) == 1
    assert len(scores_of(played, "tail dropped")) == 1000


@pytest.mark.slow
def test_ranks_draw_different_random_numbers(played: list[dict[str, Any]]) -> None:
    for name in ("uniform", "uniform by seed"):
        scores = scores_of(played, name)
        assert len(scores.unique()) == len(scores) == 1001


@pytest.mark.slow
def test_summaries_are_put_together_within_their_rank_error(played: list[dict[str, Any]]) -> None:
    alone = ffcp.CP(small_mlp()).calibrate(X, Y)
    few = ffcp.CP(alone.model).calibrate(X[:50], Y[:50]).compress(0.02).calibration
    few = few.with_state(points_of(played, "compressed"))
    ordered = alone.calibration.scores[:, 0]
    assert len(few) == 1001
    assert 0 < few.rank_error <= 0.02
    for alpha in (0.01, 0.1, 0.5, 0.9):
        k = conformal_rank(1001, alpha)
        found = few.quantile(alpha).item()
        last = min(1001, k + round(few.rank_error * 1001))
        # Scores of other batches are rounded in other ways.
        assert ordered[k - 1] * (1 - 1e-5) <= found <= ordered[last - 1] * (1 + 1e-5)
    for name in ("compressed groups", "updated and compressed"):
        assert len(scores_of(played, name)) < 250


@pytest.mark.slow
def test_points_that_were_there_count_once_when_all_ranks_update(
    played: list[dict[str, Any]],
) -> None:
    alone = ffcp.CP(small_mlp()).calibrate(X[:900], Y[:900]).calibration.scores
    torch.testing.assert_close(scores_of(played, "updated"), alone)
    told = points_of(played, "updated and compressed")["pieces"]
    assert int(told[:, 0, 1].sum()) == 900


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILS)
def test_all_ranks_fail_with_the_message_of_the_one_that_does(
    played: list[dict[str, Any]], name: str
) -> None:
    for found in played:
        kind, message = found[name]
        assert isinstance(kind, str), "it did not fail"
        assert FAILS[name] in message
        assert (kind, message) == played[0][name]


@pytest.mark.slow
def test_a_failure_changes_nothing_and_the_group_goes_on(played: list[dict[str, Any]]) -> None:
    assert all(found["unchanged"] is True for found in played)
    first, last = (scores_of(played, name) for name in ("CP", "after all that"))
    assert torch.equal(first, last)


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_is_gone(tmp_path: Path) -> None:
    # Within less than the group's own patience.
    assert ended(tmp_path, "killed", patience=100) == [1, 9, 1, 1]


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    subprocess.run(
        [*run, "-m", "tests.distributed.worker", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    files = [(tmp_path / str(rank)).read_bytes() for rank in range(4)]
    assert all(file == files[0] for file in files)


# -- in this process -------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    meet = f"file://{tmp_path / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["CP", "groups", "weights", "choice", "RAPS", "LCP", "VennAbers"])
def test_a_group_of_one_gives_what_calibrate_does(name: str) -> None:
    make, y, more = METHODS[name]
    here = {"seed": 1} if name == "RAPS" else {}
    one = ffcp.RAPS(small_mlp(outputs=3), **here) if here else make()
    other = ffcp.RAPS(small_mlp(outputs=3), **here) if here else make()
    one.calibrate(X, y, **more)
    ffcp.distributed.calibrate(other, X, y, **more)
    mine, theirs = one.calibration.state(), other.calibration.state()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[kind], theirs[kind]) for kind in mine)
    assert one.comparable() == other.comparable()
    assert one._state.set_aside == other._state.set_aside


@pytest.mark.usefixtures("alone")
def test_a_new_calibration_takes_nothing_from_the_one_before() -> None:
    predictor = ffcp.CP(small_mlp(), seed=3).calibrate(X, Y, groups=GROUPS).compress(0.1)
    ffcp.distributed.calibrate(predictor, X[:500], Y[:500])
    alone = ffcp.CP(small_mlp(), seed=3).calibrate(X[:500], Y[:500])
    assert torch.equal(predictor.calibration.scores, alone.calibration.scores)
    assert predictor.comparable() == alone.comparable()
    assert predictor.seed == 3
    assert torch.equal(predictor.predict_interval(X).lower, alone.predict_interval(X).lower)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("y", [Y, Y[:, None]], ids=["(n,)", "(n, 1)"])
def test_intervals_have_the_shape_of_the_targets_of_all_ranks(y: torch.Tensor) -> None:
    predictor = ffcp.distributed.calibrate(ffcp.CP(small_mlp()), X, y)
    assert predictor.predict_interval(X[:7]).lower.shape == y[:7].shape


@pytest.mark.usefixtures("alone")
def test_compressed_points_are_those_of_calibrate() -> None:
    predictor = ffcp.distributed.calibrate(ffcp.CP(small_mlp()), X, Y, rank_error=0.1)
    assert len(predictor.calibration) == 1001
    assert predictor.calibration.rank_error <= 0.1


@pytest.mark.usefixtures("alone")
def test_scores_are_exchanged_and_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, gather = list[int](), dist.all_gather_object

    def counted(told: list[Any], mine: bytes, group: Any = None) -> None:
        sent.append(len(mine))
        gather(told, mine, group=group)

    monkeypatch.setattr(dist, "all_gather_object", counted)
    wide = torch.arange(1001 * 400.0).reshape(1001, 400)  # 1.6 MB
    ffcp.distributed.calibrate(ffcp.CP(nn.Linear(400, 1)), wide, Y)
    assert 9 * 1001 < sum(sent) < 15_000  # a score and a sign of each row


@pytest.mark.usefixtures("alone")
def test_what_fails_here_fails_as_before() -> None:
    with pytest.raises(ValueError, match="rank 0"):
        ffcp.distributed.calibrate(
            ffcp.CP(small_mlp()), X, Y.index_fill(0, torch.tensor(5), np.nan)
        )
    with pytest.raises(TypeError, match="CrossConformal"):
        ffcp.distributed.calibrate(object.__new__(ffcp.CrossConformal), X, Y)


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ffcp.distributed.calibrate(ffcp.CP(small_mlp()), X, Y)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17, 100])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}])
def test_own_rows_of_all_samplers_are_every_row_once(
    rows: int, ranks: int, options: dict[str, bool]
) -> None:
    data, seen = TensorDataset(torch.arange(rows)), []
    for rank in range(ranks):
        sampler = DistributedSampler(data, ranks, rank, **options)
        share = Share.of(DataLoader(data, sampler=sampler))
        assert share is not None
        seen += list(sampler)[: share.rows]
    assert len(set(seen)) == len(seen)
    assert len(seen) == (max(0, sampler.total_size) if options.get("drop_last") else rows)


def test_a_sampler_of_ones_own_is_refused() -> None:
    class Backwards(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(list(super().__iter__())[::-1])

    data = TensorDataset(X, Y)
    with pytest.raises(ValueError, match="Backwards"):
        Share.of(DataLoader(data, sampler=Backwards(data, 4, 0)))


@pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="came with torch 2.6"
)
def test_a_loader_whose_batches_come_in_any_order_is_refused() -> None:
    data = TensorDataset(X, Y)
    loader = DataLoader(data, sampler=DistributedSampler(data, 4, 3), in_order=False)
    with pytest.raises(ValueError, match="in_order"):
        Share.of(loader)


def test_the_scenes_have_a_name_once() -> None:
    assert set(FAILS) < set(scenes.SCENES)
