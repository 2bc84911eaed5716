"""Learn then Test: p-values against scipy and MAPIE, the law of what is certified, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.conformal.binomial import binomial_cdf, mean_p_values
from ffcp.risk.losses import answers as answers_at
from tests.conftest import normal
from tests.law import ERROR_RATE

ALPHA, PAC = 0.2, 0.9
# The true risk at each level, neither rising nor falling: half of them just miss alpha.
RISKS = torch.tensor([0.13, 0.201, 0.17, 0.201, 0.201, 0.1, 0.201, 0.19, 0.12, 0.201])
LEVELS = list(range(len(RISKS)))
SHARES = torch.linspace(0.3, 0.9, len(RISKS))  # of rows that count, if not all do


# -- p-values --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 60, 1000, 20_000])
@pytest.mark.parametrize("p", [Fraction(1, 1000), Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)])
def test_binomial_tails_are_those_of_scipy(n: int, p: Fraction) -> None:
    hits = sorted({0, 1, n // 20, n // 10, n // 3, n // 2, n - 1, n})
    ours, theirs = binomial_cdf(hits, n, p), stats.binom.cdf(hits, n, float(p))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-60)


def hoeffding_bentkus(mean: float, n: int, alpha: float) -> float:
    kl = sum(
        share * math.log(share / base)
        for share, base in ((min(mean, alpha), alpha), (1 - min(mean, alpha), 1 - alpha))
        if share
    )
    bentkus = math.e * stats.binom.cdf(math.ceil(n * mean), n, alpha)
    return float(min(math.exp(-n * kl), bentkus, 1.0))


@pytest.mark.parametrize("n", [5, 80, 3000])
def test_p_values_are_those_of_hoeffding_and_bentkus(n: int) -> None:
    sums = [Fraction(n * part, 64) for part in (0, 1, 5, 9, 20, 64)]
    ours = mean_p_values(sums, n, Fraction(1, 5), binary=False)
    theirs = [hoeffding_bentkus(float(total / n), n, 0.2) for total in sums]
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-60)
    assert mean_p_values([Fraction(0)], 0, Fraction(1, 5), binary=True) == [1.0]


# -- MAPIE -----------------------------------------------------------------------------------


class Positive:
    """Whether the class 1 is predicted: the probability is at least the level."""

    def __call__(self, output: Tensor, level: float) -> Tensor:
        return output.double().sigmoid()[:, 0] >= level


def among(condition: Callable[[Tensor, Tensor], Tensor], wrong: Callable[..., Tensor]) -> Any:
    """Return a loss: what is wrong, among the rows that meet a condition."""

    def loss(positive: Tensor, y: Tensor) -> Tensor:
        return wrong(positive, y).double().masked_fill(~condition(positive, y), math.nan)

    return loss


PRECISION = among(lambda positive, y: positive, lambda positive, y: y == 0)
RECALL = among(lambda positive, y: y == 1, lambda positive, y: ~positive)
ACCURACY = among(lambda positive, y: positive | True, lambda positive, y: positive != (y == 1))


@pytest.mark.parametrize(
    ("names", "losses", "targets"),
    [
        (["precision"], [PRECISION], [0.7]),
        (["recall"], [RECALL], [0.8]),
        (["accuracy"], [ACCURACY], [0.65]),
        (["precision", "recall"], [PRECISION, RECALL], [0.6, 0.5]),
    ],
)
def test_levels_and_p_values_are_those_of_mapie(
    names: list[str], losses: list[Any], targets: list[float]
) -> None:
    peers = pytest.importorskip("mapie.risk_control")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(800, 1, generator=generator)
    y = (torch.rand(800, generator=generator) < (1.5 * x[:, 0]).sigmoid()).long()
    grid = np.linspace(0, 0.99, 100)

    def probabilities(rows: Any) -> np.ndarray:
        one = torch.as_tensor(rows).double().sigmoid().numpy()[:, 0]
        return np.stack([1 - one, one], axis=1)

    peer = peers.BinaryClassificationController(
        probabilities, names if len(names) > 1 else names[0],
        targets if len(names) > 1 else targets[0],
        confidence_level=PAC, list_predict_params=grid, fwer_method="bonferroni",
        best_predict_param_choice="precision",
    ).calibrate(x.numpy(), y.numpy())  # fmt: skip
    risk = ffcp.RiskControl(
        nn.Identity(), losses, sets=Positive(), grid=grid.tolist(), pac=PAC, binary=True,
        correction="bonferroni",
    ).calibrate(x, y)  # fmt: skip
    ours = risk.certified([round(1 - target, 9) for target in targets])
    assert 0 < len(ours.levels) < 100
    assert ours.levels.tolist() == peer.valid_predict_params.tolist()
    which = [grid.tolist().index(level) for level in ours.levels.tolist()]
    theirs = np.ravel(peer.p_values)[which]
    same = np.isclose(ours.p_values, theirs, rtol=1e-9, atol=0)
    # MAPIE rounds n * (k / n) up, which floating point puts above k in places: one hit too many.
    assert same.mean() > 0.4
    assert bool((ours.p_values.numpy() <= theirs * (1 + 1e-9)).all())


# -- the law ---------------------------------------------------------------------------------


def sets_of(output: Tensor, level: float) -> int:
    return int(level)


def wrong(level: int, y: Tensor) -> Tensor:
    """Lose 1 with the probability of the level; levels are independent of each other."""
    return (y[:, level] < RISKS[level]).double()


def partly(level: int, y: Tensor) -> Tensor:
    """Lose between 0 and twice the risk of the level."""
    return 2 * RISKS[level].double() * y[:, level].double()


def answered(level: int, y: Tensor) -> Tensor:
    """Lose as ``wrong`` does, among the rows that count at the level."""
    return wrong(level, y).masked_fill(y[:, level + len(RISKS)] > SHARES[level], math.nan)


KINDS: dict[str, tuple[Any, Any, bool]] = {
    "0 and 1": (wrong, ALPHA, True),
    "0 and 1, taken for any": (wrong, ALPHA, False),
    "between": (partly, ALPHA, False),
    "answered": (answered, ALPHA, True),
    "several": ([wrong, partly], (ALPHA, 0.25), [True, False]),
}


@pytest.mark.heavy
@pytest.mark.parametrize("correction", ["bonferroni", "fixed_sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_certified_controls_its_risk_with_probability_pac(
    kind: str, correction: str
) -> None:
    loss, alpha, binary = KINDS[kind]
    generator, repeats, rows = torch.Generator().manual_seed(1), 400, 300
    risk = ffcp.RiskControl(
        ffcp.Stored(), loss, sets=sets_of, grid=LEVELS, pac=PAC, binary=binary,
        correction=correction,
    )  # fmt: skip
    false, found = 0, 0
    for _ in range(repeats):
        y = torch.rand(rows, 2 * len(RISKS), generator=generator)
        levels = risk.calibrate(torch.zeros(rows, 1), y).certified(alpha).levels.long()
        false += int((RISKS[levels] > ALPHA).any())
        found += len(levels)
    # A right program fails for the share ERROR_RATE of all seeds.
    assert stats.binom.sf(false - 1, repeats, 1 - PAC) > ERROR_RATE
    assert found > repeats / 4  # and it certifies something


@pytest.mark.heavy
def test_levels_with_small_mean_losses_do_not_obey_the_law() -> None:
    generator, false = torch.Generator().manual_seed(1), 0
    for _ in range(100):
        y = torch.rand(300, 2 * len(RISKS), generator=generator)
        means = torch.stack([wrong(level, y).mean() for level in LEVELS])
        false += int((RISKS[means <= ALPHA] > ALPHA).any())
    assert stats.binom.sf(false - 1, 100, 1 - PAC) < ERROR_RATE


@pytest.mark.heavy
def test_accuracy_among_answered_rows_is_as_promised_for_rows_to_come() -> None:
    """Through predict_set: many rows at once, and one at a time."""
    generator, repeats, used, shares = torch.Generator().manual_seed(2), 300, [], []
    new = 4 * torch.randn(200_000, 3, generator=generator)
    chance = (new / 1.3).softmax(dim=1)  # the network is too sure
    # A coarse grid, so that the true accuracy at each level is measured once.
    risk = ffcp.RiskControl(
        nn.Identity(), "wrong_answers", sets="answers", pac=PAC, seed=0,
        grid=[step / 20 for step in range(20)],
    )  # fmt: skip
    for _ in range(repeats):
        x = 4 * torch.randn(500, 3, generator=generator)
        y = torch.multinomial((x / 1.3).softmax(dim=1), 1, generator=generator)[:, 0]
        certified = risk.calibrate(x, y).certified(0.1)
        if not len(certified.levels):
            continue
        found = risk.predict_set(new[:40], 0.1)
        one = torch.cat([risk.predict_set(row[None], 0.1).sets for row in new[:2]])
        assert torch.equal(one, found.sets[:2])
        used.append(float(found.level[0]))
        shares.append(float(certified.shares[0]))
    right, seen = {}, []
    for level in set(used):
        sets = answers_at(new, level)
        right[level] = float(chance.gather(1, sets.clamp_min(0)[:, None])[sets >= 0].mean())
        seen += [float((sets >= 0).double().mean())] * used.count(level)
    false = sum(right[level] < 0.9 for level in used)
    assert stats.binom.sf(false - 1, repeats, 1 - PAC) > ERROR_RATE
    assert len(used) > repeats / 2
    assert abs(np.mean(shares) - np.mean(seen)) < 0.02


# -- what is kept, and what is refused -------------------------------------------------------


def answers(rows: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    x = 3 * normal(rows, 4, seed=seed)
    y = torch.distributions.Categorical(logits=x)
    torch.manual_seed(seed)
    return x, y.sample()


def control(**given: Any) -> ffcp.RiskControl:
    return ffcp.RiskControl(
        nn.Identity(), "wrong_answers", sets="answers", **{"pac": PAC, "seed": 0, **given}
    )


def test_the_first_certified_level_of_the_grid_is_used_and_the_share_answered_reported() -> None:
    x, y = answers(1000)
    for grid in ([0.5, 0.7, 0.9], [0.9, 0.7, 0.5]):
        risk = control(grid=grid, correction="bonferroni").calibrate(x, y)
        certified, found = risk.certified(0.1), risk.predict_set(x, 0.1)
        assert bool((found.level == certified.levels[0]).all())
        assert certified.levels.tolist() == [one for one in grid if one in certified.levels]
        given = found.sets >= 0
        assert float(certified.shares[0]) == float(given.double().mean())
        wrong = (found.sets != y)[given].double().mean()
        assert float(certified.risks[0]) == pytest.approx(float(wrong), abs=1e-12)


def test_one_logit_answers_as_two() -> None:
    z = normal(50, 1, seed=4)
    for level in (0.0, 0.6, 0.9):
        two = answers_at(torch.cat([0 * z, z], dim=1), level)
        assert torch.equal(answers_at(z, level), two)
        assert torch.equal(answers_at(z[:, 0], level), two)


def test_where_nothing_is_certified_nothing_is_returned() -> None:
    x, y = answers(40)
    risk = control().calibrate(x, y)
    assert len(risk.certified(0.01).levels) == 0
    with pytest.raises(RuntimeError, match="alpha"):
        risk.predict_set(x, 0.01)


def test_rows_that_order_do_not_test() -> None:
    x, y = answers(500)
    ordered, all_rows = control().calibrate(x, y), control(correction="bonferroni").calibrate(x, y)
    assert (len(ordered.calibration), len(all_rows.calibration)) == (400, 500)
    totals = ordered.state()["score.counts"]
    assert int(totals[0, 0]) == 100
    order = ordered._state.score.order([Fraction(1, 10)], [True])
    assert sorted(order.tolist()) == list(range(101))


@pytest.mark.parametrize("correction", ["bonferroni", "fixed_sequence"])
def test_files_hold_what_certifies(correction: str, tmp_path: Any) -> None:
    (x, y), path = answers(500), tmp_path / "risk.safetensors"
    risk = control(correction=correction).calibrate(x, y)
    risk.save(path)
    loaded = ffcp.load(path, risk.model)
    for mine, theirs in zip(risk.certified(0.1), loaded.certified(0.1), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ffcp.CalibrationFileError, match="pac"):
        control(pac=0.8, correction=correction).load(path)
    with pytest.raises(ffcp.CalibrationFileError):
        ffcp.RiskControl(nn.Identity()).load(path)


def test_workers_merge_once_one_has_ordered() -> None:
    x, y = answers(900)
    first = control().calibrate(x[:500], y[:500])
    other = first.settled(seed=1).calibrate(x[500:], y[500:])
    before = len(first.calibration)
    assert len(first.merge(other).calibration) == before + 400
    with pytest.raises(ValueError, match="settings differ"):
        first.merge(control(seed=2).calibrate(x, y))


def test_what_cannot_be_tested_is_refused() -> None:
    x, y = answers(60)
    with pytest.raises(ValueError, match="groups"):
        control().calibrate(x, y, groups=[0, 1] * 30)
    with pytest.raises(ValueError, match="compressed"):
        control(correction="bonferroni").calibrate(x, y, rank_error=0.1)
    with pytest.raises(ValueError, match="pac"):
        ffcp.RiskControl(nn.Identity(), ["any_missed", "false_negatives"])
    with pytest.raises(ValueError, match="holm"):
        control(correction="holm")
    with pytest.raises(ValueError, match="pac"):
        control(pac=1.5)
    with pytest.raises(ValueError, match="loss"):
        ffcp.RiskControl(nn.Identity(), [], pac=PAC)
    with pytest.raises(ValueError, match="levels"):
        control(grid=[0.5, 0.5])
    half = ffcp.RiskControl(
        nn.Identity(), lambda sets, y: torch.full((len(y),), 0.5), pac=PAC, binary=True
    )
    with pytest.raises(ValueError, match="binary"):
        half.calibrate(x, y)
    with pytest.raises(ValueError, match="class"):
        control().calibrate(x, y[:, None])
    with pytest.raises(ValueError, match="alpha"):
        control().calibrate(x, y).certified((0.1, 0.2))
    with pytest.raises(RuntimeError, match="pac"):
        ffcp.RiskControl(nn.Identity()).calibrate(x, x > 0).certified()


def test_losses_of_several_risks_have_units_of_their_own() -> None:
    x = normal(100, 3, seed=5)
    risk = ffcp.RiskControl(
        nn.Identity(), ["any_missed", lambda mask, y: 3.0 * mask.sum(dim=1)], pac=PAC,
        bound=(1, 9), grid=[0.2, 0.8], correction="bonferroni",
    ).calibrate(x, x > 0)  # fmt: skip
    losses = risk.losses(x, x > 0)
    assert losses.shape == (100, 2, 2)
    assert float(losses[:, 1].max()) == 9.0
    found = risk.certified((0.9, 8.9))
    assert found.risks.allclose(losses.mean(dim=0).T)
