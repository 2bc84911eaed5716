"""Auto: all methods compared on rows that do not calibrate."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.regression.comparison import Comparison, MethodCandidate, RowCounts
from tests.conftest import normal, small_mlp
from tests.core import few_epochs, only_method


@pytest.fixture
def _short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    few_epochs(monkeypatch)


def steep(rows: int, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Noise in proportion to the prediction, which gradients cannot see in a linear model."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    x = normal(rows, 2, seed=seed)
    with torch.no_grad():
        model[2].weight.mul_(3)
        y = model(x)[:, 0]
    return model, x, y + (0.05 + y.abs()) * normal(rows, seed=seed + 1)


@pytest.mark.usefixtures("_short_lessons")
def test_every_candidate_is_judged_and_the_best_is_taken() -> None:
    model, x, y = steep(1000)
    predictor = ffcp.Auto(model, seed=0).fit(x[:300], y[:300]).calibrate(x[300:], y[300:])
    choice = predictor.choice
    assert choice is not None
    assert choice.method == min(choice.trials, key=lambda name: choice.trials[name].score)
    learned = "learned from training and calibration rows, by"
    assert {
        "CP",
        "FFCP at '0'",
        f"{learned} networks",
        f"{learned} networks, from the densest part",
        f"{learned} trees",
        f"{learned} trees and networks, from the densest part",
    } <= set(choice.trials)
    assert choice.rows == RowCounts(300 + 420, 420, 280)  # two fifths of few rows calibrate
    assert len(predictor.calibration) == 280
    assert "720 rows to learn from, 420 to compare, 280 to calibrate" in str(choice)
    assert predictor.method in str(choice)


@pytest.mark.usefixtures("_short_lessons")
def test_as_many_rows_calibrate_as_are_asked_for(tmp_path: Path) -> None:
    model, x, y = steep(700)
    predictor = ffcp.Auto(model, calibrate_rows=500, seed=0).calibrate(x, y)
    assert len(predictor.calibration) == 500
    predictor.save(tmp_path / "auto.safetensors")
    again = ffcp.load(tmp_path / "auto.safetensors", model)
    assert again.choice.rows == RowCounts(200, 200, 500)
    assert len(again.calibrate(x, y).calibration) == 500


@pytest.mark.usefixtures("_short_lessons")
def test_more_rows_calibrate_for_a_small_alpha_and_in_groups() -> None:
    model, x, y = steep(4000)
    on = "prediction"
    for alpha, groups, left in ((0.2, None, 500), (0.08, None, 1250), (0.1, x[:, 0] > 0, 1600)):
        predictor = ffcp.Auto(model, on=on, selection_alpha=alpha, seed=0)
        assert len(predictor.calibrate(x, y, groups=groups).calibration) == left


@pytest.mark.usefixtures("_short_lessons")
def test_without_lightgbm_the_choice_says_what_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    model, x, y = steep(500)
    predictor = ffcp.Auto(model, seed=0).fit(x[:200], y[:200]).calibrate(x[200:], y[200:])
    assert not any("trees" in name for name in predictor.choice.trials)
    assert any("networks" in name for name in predictor.choice.trials)
    assert "ffcp[trees]" in str(predictor.choice)
    predictor.save(tmp_path / "auto.safetensors")
    assert ffcp.load(tmp_path / "auto.safetensors", model).choice == predictor.choice


@pytest.mark.usefixtures("_short_lessons")
def test_the_criterion_decides() -> None:
    model, x, y = steep(1000)
    predictor = ffcp.Auto(model, criterion="length", seed=0).calibrate(x, y)
    assert predictor.choice is not None
    trials = predictor.choice.trials
    assert trials[predictor.choice.method].length == min(t.length for t in trials.values())
    with pytest.raises(ValueError, match="criterion"):
        ffcp.Auto(model, criterion="width")


@pytest.mark.heavy
def test_learning_beats_plain_bands_where_noise_depends_on_the_input() -> None:
    model, x, y = steep(3000)
    predictor = (
        ffcp.Auto(model, seed=0).fit(x[:1000], y[:1000]).calibrate(x[1000:2000], y[1000:2000])
    )
    plain = ffcp.CP(model).calibrate(x[1000:2000], y[1000:2000])
    ours, theirs = (
        float(ffcp.metrics.interval_score(p.predict_interval(x[2000:]), y[2000:]))
        for p in (predictor, plain)
    )
    assert ours < 0.85 * theirs


LEARNED = "learned from calibration rows, by trees and networks"
WEIGHTED = {
    "plain": (None, {}),
    "given": (ffcp.calibrations.Weighted("given"), {"weights": normal(600, seed=3).exp()}),
    "learned": (ffcp.calibrations.Weighted("learn"), {"new": 0.5 + normal(300, 2, seed=4)}),
    "learned in groups": (
        ffcp.calibrations.Mondrian(ffcp.calibrations.Weighted("learn")),
        {"new": 0.5 + normal(300, 2, seed=4), "groups": ["a", "b"] * 300},
    ),
}


@pytest.mark.long
@pytest.mark.usefixtures("_short_lessons")
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize(("wanted", "kind"), [*product(("CP", "FFCP at '0'", LEARNED), WEIGHTED)])
def test_every_kind_of_choice_is_saved_and_loaded(
    wanted: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_method(monkeypatch, wanted)
    model, x, y = steep(600)
    calibration, given = WEIGHTED[kind]
    predictor = ffcp.Auto(model, calibration=calibration, seed=0).calibrate(x, y, **given)
    assert predictor.method == wanted
    new = {name: given[name][:9] for name in ("weights", "groups") if name in given}
    band = predictor.predict_interval(x[:9], **new)
    predictor.save(tmp_path / "auto.safetensors")
    for other in (
        ffcp.load(tmp_path / "auto.safetensors", model),
        pickle.loads(pickle.dumps(predictor)),
    ):
        assert other.method == wanted
        assert torch.equal(other.predict_interval(x[:9], **new).upper, band.upper)
    again = ffcp.load(tmp_path / "auto.safetensors", model)
    assert again.choice == predictor.choice
    assert again.shift_choice == predictor.shift_choice


@pytest.mark.long
@pytest.mark.usefixtures("_short_lessons")
@pytest.mark.parametrize("common", [{"joint": True}, {"side": "each"}, {"side": "lower"}], ids=str)
def test_units_of_several_outputs_do_not_matter(common: dict[str, object]) -> None:
    x, y = normal(800, 4, seed=0), normal(800, 2, seed=1)
    model = small_mlp(outputs=2)
    large = nn.Sequential(model, Times(torch.tensor([1.0, 1024.0])))
    bands = []
    for net, factor in ((model, 1.0), (large, 1024.0)):
        target = y * torch.tensor([1.0, factor])
        on = ["prediction"]  # norms inside the model are those of its layers
        predictor = ffcp.Auto(net, on=on, seed=0, **common).calibrate(x, target)
        bands.append((predictor.method, predictor.predict_interval(x)))
    (first, small), (second, wide) = bands
    assert first == second
    assert torch.allclose(small.lower[:, 1] * 1024, wide.lower[:, 1], rtol=1e-4)


class Times(nn.Module):
    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = nn.Parameter(factors)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


@pytest.mark.long
@pytest.mark.usefixtures("_short_lessons")
def test_groups_have_thresholds_of_their_own_whatever_is_chosen() -> None:
    model, x, y = steep(900)
    groups = (x[:, 0] > 0).long()
    predictor = ffcp.Auto(model, seed=0).calibrate(x, y, groups=groups)
    assert set(predictor.calibration.groups) == {0, 1}
    predictor.predict_interval(x[:5], groups=groups[:5])


@pytest.mark.parametrize("rows", [10, 20, 60, 85])
def test_too_few_rows_to_learn_from_all_calibrate(rows: int, tmp_path: Path) -> None:
    model, x, y = steep(rows)
    predictor = ffcp.Auto(model).calibrate(x, y)
    assert predictor.method == "CP"
    assert len(predictor.calibration) == rows
    plain = ffcp.CP(model).calibrate(x, y)
    assert torch.equal(predictor.predict_interval(x).upper, plain.predict_interval(x).upper)
    predictor.save(tmp_path / "c.safetensors")
    for choice in (predictor.choice, ffcp.load(tmp_path / "c.safetensors", model).choice):
        assert (choice.method, choice.rows, dict(choice.trials)) == (
            "CP",
            RowCounts(0, 0, rows),
            {},
        )
        assert "few" in str(choice)


@pytest.mark.usefixtures("_short_lessons")
def test_what_training_rows_taught_is_compared_on_few_rows() -> None:
    model, x, y = steep(340)
    fitted = ffcp.Auto(model, seed=0).fit(x[:300], y[:300])
    trials = fitted.calibrate(x[300:], y[300:]).choice.trials
    assert "learned from training and calibration rows, by networks" in trials
    few = fitted.calibrate(x[320:], y[320:])  # of which no eight can tell a difference
    assert (few.method, len(few.calibration)) == ("CP", 20)


@pytest.mark.usefixtures("_short_lessons")
@pytest.mark.parametrize(("side", "needed"), [("both", 9), ("each", 19)])
def test_no_group_gives_rows_that_alpha_needs(side: str, needed: int) -> None:
    groups = ["few"] * (needed - 1) + ["enough"] * needed + ["many"] * 200 + list("abc" * 20)
    x, y = normal(len(groups), 2, seed=1), normal(len(groups), seed=2)
    predictor = ffcp.Auto(steep(1)[0], side=side, seed=0).calibrate(x, y, groups=groups)
    counts = predictor.calibration.groups
    assert predictor.choice.rows.compare > 60  # others can spare some
    assert counts["enough"] == needed
    assert min(counts[name] for name in "abc") >= needed
    with pytest.warns(ffcp.FFCPWarning, match="'few'"):
        interval = predictor.predict_interval(x, groups=groups)
    assert bool((interval.upper.isinf() == torch.tensor([g == "few" for g in groups])).all())


@pytest.mark.usefixtures("_short_lessons")
def test_no_output_gives_known_targets_that_alpha_needs() -> None:
    x, y = normal(220, 4, seed=1), normal(220, 2, seed=2)
    y[11:, 1] = torch.nan
    predictor = ffcp.Auto(small_mlp(outputs=2), missing=True, seed=0).calibrate(x, y)
    assert 0 < predictor.choice.rows.compare < 120
    assert bool(predictor.predict_interval(x[:3]).upper.isfinite().all())


def test_outputs_that_share_a_threshold_are_scaled_by_few_rows() -> None:
    x, y = normal(60, 4, seed=1), normal(60, 3, seed=2) * torch.tensor([0.1, 1.0, 100.0])
    predictor = ffcp.Auto(small_mlp(outputs=3), joint=True, seed=0).calibrate(x, y)
    width = predictor.predict_interval(x).width.mean(dim=0)
    assert width[0] < 0.1 * width[2]


@pytest.mark.heavy
def test_few_rows_are_not_worse_off_than_where_some_are_set_aside() -> None:
    """Interval score of ffcp.Auto relative to CP, over noise that is flat and noise that grows."""
    relative = []
    for seed in range(60):
        for rows in (20, 40, 60):
            model, x, y = steep(rows + 500, seed)
            y = y if seed % 2 else model(x)[:, 0].detach() + normal(rows + 500, seed=seed + 1)
            new, target = x[rows:], y[rows:]
            scores = [
                ffcp.metrics.interval_score(
                    one.calibrate(x[:rows], y[:rows]).predict_interval(new), target, 0.1
                )
                for one in (ffcp.Auto(model, seed=0), ffcp.CP(model))
            ]
            relative.append(scores[0] / scores[1])
    assert sum(relative) / len(relative) <= 1.0 + 1e-9  # 1.05 with two fifths set aside


@pytest.mark.usefixtures("_short_lessons")
def test_new_bands_do_not_depend_on_how_rows_come() -> None:
    model, x, y = steep(500)
    predictor = ffcp.Auto(model, seed=0).calibrate(x, y)
    whole = predictor.predict_interval(x[:20])
    single = torch.cat([predictor.predict_interval(row[None]).upper for row in x[:20]])
    assert torch.allclose(single, whole.upper, rtol=1e-4)


@pytest.mark.usefixtures("_short_lessons")
def test_a_choice_is_silent() -> None:
    model, x, y = steep(500)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ffcp.FFCPWarning)
        ffcp.Auto(model, seed=0).calibrate(x, y)


@pytest.mark.heavy
def test_where_rows_tell_no_difference_plain_intervals_are_mostly_taken() -> None:
    taken = []
    for seed in range(20):
        x = normal(400, 4, seed=seed)
        taken.append(
            ffcp.Auto(small_mlp(), seed=0).calibrate(x, normal(400, seed=seed + 50)).method
        )
    assert taken.count("CP") >= 12  # the best of fourteen is lucky now and then


@pytest.mark.usefixtures("_short_lessons")
def test_pac_coverage_is_that_of_the_loaded_predictor_too(tmp_path: Path) -> None:
    model, x, y = steep(500)
    predictor = ffcp.Auto(model, seed=0).calibrate(x, y)
    predictor.save(tmp_path / "c.safetensors")
    again = ffcp.load(tmp_path / "c.safetensors", model)
    ends = [one.predict_interval(x, pac=0.95).upper for one in (predictor, again)]
    assert torch.equal(*ends)
    assert bool((ends[0] >= predictor.predict_interval(x).upper).all())


@pytest.mark.usefixtures("_short_lessons")
def test_the_mean_of_both_learners_is_taken_unless_another_is_clearly_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, y = steep(500)

    def chosen(clearly_better_than: Callable[[MethodCandidate], bool]) -> str | None:
        def judged(_: Any, best: Any, other: MethodCandidate, criterion: str) -> bool:
            return clearly_better_than(other)

        monkeypatch.setattr(Comparison, "is_clearly_better", judged)
        return ffcp.Auto(model, seed=0).calibrate(x, y).method

    def is_plain(one: MethodCandidate) -> bool:
        return float((one.upper - one.lower).std()) < 1e-6

    assert chosen(lambda other: False) == "CP"
    assert chosen(is_plain) == "learned from calibration rows, by trees and networks"
    monkeypatch.setattr(Comparison, "is_clearly_better", lambda *_: True)
    choice = ffcp.Auto(model, seed=0).calibrate(x, y).choice
    assert choice is not None
    assert choice.method == min(choice.trials, key=lambda name: choice.trials[name].score)


@pytest.mark.long
@pytest.mark.usefixtures("_short_lessons")
def test_rows_that_will_not_come_have_no_say_in_the_choice() -> None:
    """With a ratio of 0 for half of the inputs, candidates are judged where new ones are."""
    model, x, y = steep(1000)
    ratio = lambda x: (x[:, 0] > 0).double()  # noqa: E731
    wild = torch.where(x[:, 0] > 0, y, 1000 * y)
    predictors = [
        ffcp.Auto(model, on="norms", calibration=calibration, seed=0).calibrate(x, target)
        for calibration, target in (
            (ffcp.calibrations.Weighted(ratio), y),
            (ffcp.calibrations.Weighted(ratio), wild),
            (None, wild),
        )
    ]
    choices = [one.choice for one in predictors]
    assert all(choices)
    names = ["CP", "FFCP at '0'", "FFCP at '1'"]
    tame, same, alike = ([choice.trials[name] for name in names] for choice in choices if choice)
    assert tame == same != alike
    band = predictors[1].predict_interval(x[x[:, 0] > 0])
    assert (
        float(band.width.median()) < 100 < float(predictors[2].predict_interval(x).width.median())
    )


@pytest.mark.usefixtures("_short_lessons")
def test_a_ratio_that_leaves_too_little_is_left_to_plain_bands() -> None:
    model, x, y = steep(400)
    heavy = ffcp.calibrations.Weighted(lambda x: (6 * x[:, 0]).exp())
    predictor = ffcp.Auto(model, calibration=heavy, seed=0).calibrate(x, y)
    assert predictor.calibration.effective_size < 5
    assert predictor.method == "CP"
    with pytest.warns(ffcp.FFCPWarning, match="calibration"):
        predictor.predict_interval(x[:50].abs() + 2)


@pytest.mark.parametrize(
    ("calibration", "why"),
    [
        (ffcp.calibrations.Local(), "Local"),
        (ffcp.calibrations.Mondrian(ffcp.calibrations.Local()), "Local"),
        (ffcp.calibrations.LabelShift(), "LabelShift"),
    ],
    ids=str,
)
def test_calibrations_under_which_nothing_can_be_compared_are_refused(
    calibration: ffcp.calibrations.Calibration, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        ffcp.Auto(small_mlp(), calibration=calibration)
