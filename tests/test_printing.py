"""Predictors, streams and monitors print in a few lines what a person wants to know."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ffcp
from ffcp.regression.comparison import AutoChoice, MethodTrial, RowCounts

X, Y = torch.randn(300, 3), torch.randn(300)
MODEL = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")  # that CP was chosen
def test_a_predictor_names_method_model_and_rows() -> None:
    text = repr(ffcp.FFCP(MODEL, feature="0").calibrate(X, Y))
    assert text.splitlines()[0] == "FFCP: calibrated on 300 rows"
    assert "Sequential, 41 parameters" in text
    assert "feature='0'" in text
    assert repr(ffcp.CP(MODEL)).startswith("CP: not calibrated yet")
    chosen = ffcp.FFCP(MODEL, seed=0).calibrate(X, Y)
    aside = 300 - len(chosen.calibration)
    assert f"{aside} more selected" in repr(chosen)


def test_large_numbers_are_written_with_thousands() -> None:
    ends = torch.tensor([100_000.0]), torch.tensor([300_000.0]), torch.tensor([200_000.0])
    text = repr(ffcp.Interval(*ends, 0.1))
    assert "mean width 200,000" in text
    assert text.splitlines()[-1].split() == ["0", "100,000", "200,000", "300,000"]


def test_one_row_is_no_rows_and_empty_settings_are_left_out() -> None:
    predictor = ffcp.Learned(MODEL, seed=0).calibrate(X, Y)
    assert repr(predictor.predict_interval(X[:1])).startswith("Interval: 1 row, coverage")
    assert repr(predictor.predict_interval(X[:2])).startswith("Interval: 2 rows, coverage")
    assert "[]" not in repr(predictor)


def test_notebooks_show_the_lines_of_print() -> None:
    predictor = ffcp.CP(MODEL).calibrate(X, Y)
    for shown in (predictor, ffcp.Online(predictor), ffcp.Monitor(predictor)):
        assert shown._repr_html_().startswith("<pre style='overflow-x: auto'>")  # fits a phone
        assert str(shown).splitlines()[0].split(":")[0] in shown._repr_html_()


def test_a_stream_says_how_many_targets_came_and_were_covered() -> None:
    online = ffcp.Online(ffcp.CP(MODEL).calibrate(X[:200], Y[:200]), "aci", alpha=0.2)
    for row in range(200, 240):
        online.predict_interval(X[row : row + 1])
        online.update(X[row : row + 1], Y[row : row + 1])
    text = repr(online)
    assert "80 %" in text
    share = 1 - online.misses[0] / 40
    assert f"40 targets, {share:.1%}" in text


def test_a_monitor_explains_its_columns() -> None:
    monitor = ffcp.Monitor(ffcp.CP(MODEL).calibrate(X[:200], Y[:200]))
    monitor.update(X[200:], Y[200:])
    text = str(monitor)
    assert repr(monitor) == text
    for column in ("value", "most", "limit"):
        assert f"\n{column}:" in text
    assert max(map(len, text.splitlines())) <= 80


def tried(method: str) -> AutoChoice:
    names = ["CP", "FFCP at 'backbone.3'", "learned from training and calibration rows, by trees"]
    names.append(f"{names[-1]} and networks, from the densest part")
    trials = {name: MethodTrial(4.0 - i / 3, 3.0) for i, name in enumerate(names)}
    return AutoChoice(method, trials, "score", RowCounts(720, 420, 280), 0.1)


def test_a_choice_is_a_table_that_explains_its_names_and_marks_the_chosen() -> None:
    text = str(tried("FFCP at 'backbone.3'").in_units(100_000))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (chosen,) = (line for line in lines if line.startswith("> ") and "marks" not in line)
    assert chosen.split() == [">", "FFCP", "at", "layer", "backbone.3", "366,667", "300,000"]
    assert "learned from training and calibration rows, by" in text
    assert "one width for all rows" in text
    # Two are ahead of it, and it is said why they were not taken.
    assert "standard error" in " ".join(text.split())
    best = tried(min(tried("CP").trials, key=lambda name: tried("CP").trials[name].score))
    assert "standard error" not in str(best)


def test_notebooks_show_a_choice_as_a_table() -> None:
    choice = tried("CP")
    page = choice._repr_html_()
    assert page.count("<tr>") == 1 + len(choice.trials)
    assert page.count("<b>&gt; CP") == 1


def test_label_sets_are_chosen_without_names_of_penalties() -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(400, 4)
    model = nn.Linear(4, 5)
    y = model(x).softmax(dim=1).multinomial(1)[:, 0]
    predictor = ffcp.SetPredictor(model, "auto", seed=0).calibrate(x, y)
    text = str(predictor.choice)
    assert "kreg" not in text
    assert "lam " not in text
    assert text.count("RAPS:") <= 3  # the best of each temperature, and the heading
    assert max(map(len, text.splitlines())) <= 80
    assert "method: " in repr(predictor)


@pytest.mark.parametrize(
    "predictor",
    [
        ffcp.CP(nn.Linear(3, 24), joint=True, output_scales=[i / 3 for i in range(1, 25)]),
        ffcp.RiskControl(nn.Linear(3, 4), "wrong_answers", sets="answers", pac=0.9),
        ffcp.LAC(nn.Linear(3, 12), names=[f"class number {i}" for i in range(12)]),
        ffcp.LCP(MODEL),
    ],
    ids=lambda predictor: type(predictor).__name__,
)
def test_a_predictor_with_long_settings_prints_in_80_columns(predictor: nn.Module) -> None:
    lines = repr(predictor).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 12


def test_long_lists_of_settings_are_cut_and_their_numbers_rounded() -> None:
    scales = [i / 3 for i in range(1, 25)]
    text = " ".join(repr(ffcp.CP(nn.Linear(3, 24), joint=True, output_scales=scales)).split())
    assert "output_scales=[0.3333, 0.6667, 1.0, 1.333, 1.667, 2.0, ... 24 in all]" in text


def test_a_stream_of_several_outputs_names_the_threshold_of_each_line() -> None:
    predictor = ffcp.CP(nn.Linear(3, 3)).calibrate(X, torch.randn(300, 3))
    online = ffcp.Online(predictor, "aci", alpha=0.2)
    online.predict_interval(X[:1])
    online.update(X[:1], torch.tensor([[0.0, torch.nan, 0.0]]))
    lines = [line.strip() for line in repr(online).splitlines()[2:]]
    assert [line[: line.index(":")] for line in lines] == ["threshold 0", "threshold 2"]


def test_selections_and_levels_print_in_a_line() -> None:
    predictor = ffcp.CP(MODEL, side="lower").calibrate(X, Y)
    found = ffcp.conformal_selection(predictor, X, above=-1e6)
    assert repr(found) == "Discoveries: 300 of 300 rows selected"
    classifier, labels = nn.Linear(3, 2), (Y > 0).long()
    risk = ffcp.RiskControl(classifier, "wrong_answers", sets="answers", pac=0.9)
    risk.calibrate(X, labels)
    levels = len(risk.certified(0.9).levels)
    assert repr(risk.certified(0.9)).startswith(f"Certified: {levels} levels, the first is")
    assert repr(risk.predict_set(X, 0.9)).startswith("Controlled: sets of 300 rows, level")
    assert repr(risk.certified(1e-3)) == "Certified: 0 levels"
