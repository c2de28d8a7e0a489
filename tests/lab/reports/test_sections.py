"""Tables and plots of the report sections."""

import math

import pytest

from weightnorm.lab.reports import classify, draw, generic, language, vae
from weightnorm.lab.reports.document import Plot, Section, Table, slug
from weightnorm.lab.reports.provenance import settings
from weightnorm.lab.reports.style import STYLES


def plot(section: Section, ending: str) -> Plot:
    (found,) = (one for one in section.figures if one.name.endswith(ending))
    return found


def table(section: Section, title: str) -> Table:
    (part,) = section.content
    (found,) = (one for one in part.content if isinstance(one, Table) and one.title == title)
    return found


def rows(section: Section, title: str) -> dict[str, dict[str, str]]:
    """Cells by row and column."""
    found = table(section, title)
    return {row[0]: dict(zip(found.head, row, strict=True)) for row in found.rows}


def test_the_papers_figure_has_a_line_for_each_parameterization(grid):
    drawn = plot(classify.section(grid()), "cpu-train-error").lines
    assert [line.style for line in drawn] == list(STYLES.values())
    for line in drawn:
        assert line.name == f"{line.style.name}, lr 0.003, n = 3"
        assert line.x == (1, 2, 3, 4)
        assert len(line.spread) == 4
        assert not line.unfinished
    assert drawn[0].y[-1] == pytest.approx(52)  # 0.50 + 0.01·(1, 2, 3), in percent
    assert drawn[0].spread[-1] == pytest.approx(1)


def test_the_best_rate_of_each_is_plotted_and_named(run):
    records = [
        run(parameterization="standard", learning_rate=0.0003, end=0.2),
        run(parameterization="standard", learning_rate=0.003, end=0.4),
        run(parameterization="weight-norm", learning_rate=0.0003, end=0.3),
        run(parameterization="weight-norm", learning_rate=0.003, end=0.1),
    ]
    section = classify.section(records)
    names = [line.name for line in plot(section, "cpu-train-error").lines]
    assert names == ["standard, lr 0.0003, n = 1", "weight norm, lr 0.003, n = 1"]
    assert rows(section, "Errors")["weight norm"]["lr"] == "0.003"


def test_errors_table_has_the_papers_errors(grid):
    found = rows(classify.section(grid()), "Errors")
    ours = found["weight norm + mean-only batch norm"]
    assert ours["test error, %"] == "12.00 ± 0.50"
    assert (ours["n"], ours["epochs"], ours["paper, test, %"]) == ("3", "4", "7.31")
    papers = [row["paper, test, %"] for row in found.values()]
    assert papers[:5] == ["8.43", "8.05", "8.46", "8.52", "7.31"]
    assert papers[5:] == ["11.68", "10.41", "9.6", "9.31", "9.08"]


def test_deviations_from_the_papers_size_are_noted(run):
    notes = table(classify.section([run()]), "Errors").notes
    assert notes[-1].endswith("These: width 0.25, epochs 4.")
    papers = run(preset="paper", width=1.0, epochs=200)
    assert len(table(classify.section([papers]), "Errors").notes) == 1


def test_digits_are_not_compared_with_cifar10(grid):
    section = classify.section(grid(data="digits", seeds=(1,)))
    assert "paper, test, %" not in table(section, "Errors").head
    assert len(rows(section, "Errors")) == 5
    assert rows(section, "Errors")["weight norm"]["training error, %"] == "29.00"
    assert "CIFAR-10" in table(section, "Errors").notes[-1]


def test_time_is_relative_to_standard(run):
    records = [
        run(parameterization="standard", seconds=2.0),
        run(parameterization="batch-norm", seconds=3.0),
        run(parameterization="batch-norm", seconds=2.0, seed=2),
    ]
    found = rows(classify.section(records), "Time per epoch")
    assert found["standard"]["relative to standard"] == "1.00"
    batch_norm = found["batch norm"]
    assert batch_norm["seconds per epoch"] == "2.50 ± 0.71"
    assert (batch_norm["relative to standard"], batch_norm["n"]) == ("1.25", "2")
    assert batch_norm["paper"] == "1.16"


def test_time_without_a_standard_run_has_no_ratio(run):
    found = rows(classify.section([run()]), "Time per epoch")
    assert found["weight norm"]["relative to standard"] == "—"


def test_times_on_different_machines_have_a_note(run):
    records = [run(), run(seed=2, session={"threads": 1})]
    assert "threads" in table(classify.section(records), "Time per epoch").notes[-1]
    assert len(table(classify.section(records[:1]), "Time per epoch").notes) == 1


def test_lengths_are_drawn_for_normalized_weights_only(grid):
    section = classify.section(grid())
    expected = [STYLES["weight-norm"], STYLES["weight-norm-mean-only"]]
    for ending in ("v-norm", "effective-step"):
        assert [line.style for line in plot(section, ending).lines] == expected
    assert plot(section, "v-norm").lines[0].y == pytest.approx((1, 4 / 3, 5 / 3, 2))


def test_no_figure_without_a_line(run):
    section = classify.section([run(parameterization="standard")])
    assert [one.name for one in section.figures] == [
        "classify-cpu-train-error",
        "classify-cpu-test-error",
    ]


def test_several_rates_are_compared(grid):
    section = classify.section(grid(rates=(0.0003, 0.003, 0.01)))
    for ending in ("rate-train-error", "rate-train-loss"):
        found = plot(section, ending)
        assert found.log_x
        assert [line.x for line in found.lines] == [(0.0003, 0.003, 0.01)] * 5
        assert found.lines[0].y[1] < min(found.lines[0].y[0], found.lines[0].y[2])
    assert len(table(section, "Every learning rate").rows) == 15


def test_a_diverged_rate_has_no_point(run):
    records = [run(learning_rate=0.001), run(learning_rate=0.1, end=None), run(learning_rate=0.01)]
    section = classify.section(records)
    assert plot(section, "rate-train-error").lines[0].x == (0.001, 0.01)
    every = {row[1]: row[2:] for row in table(section, "Every learning rate").rows}
    assert every["0.1"] == ("—", "—", "1")


def test_unfinished_run_is_dashed_and_not_counted(run):
    section = classify.section([run(end=0.2), run(seed=2, end=0.9, done=3)])
    finished, unfinished = plot(section, "cpu-train-error").lines
    assert (finished.unfinished, unfinished.unfinished) == (False, True)
    assert finished.name == "weight norm, lr 0.003, n = 1"
    assert unfinished.name == "weight norm, lr 0.003, seed 2: unfinished, epoch 3 of 4"
    assert unfinished.x == (1, 2, 3)
    assert "dashed" in plot(section, "cpu-train-error").caption
    ours = rows(section, "Errors")["weight norm"]
    assert (ours["training error, %"], ours["n"]) == ("20.00", "1")
    assert rows(section, "Time per epoch")["weight norm"]["n"] == "1"
    assert rows(section, "Not finished")["weight norm"]["progress"] == "epoch 3 of 4"


def test_diverged_run_is_listed(run):
    result = {"train_error": None, "diverged": {"epoch": 3, "step": 5, "message": "loss is nan"}}
    section = classify.section([run(end=0.2), run(seed=2, end=None, result=result)])
    assert rows(section, "Diverged")["weight norm"]["seed"] == "2"
    assert rows(section, "Errors")["weight norm"]["training error, %"] == "20.00 (n = 1 of 2)"


def test_run_without_epochs_is_listed_as_unfinished(run):
    section = classify.section([run(done=0)])
    assert section.figures == ()
    assert rows(section, "Errors")["weight norm"]["test error, %"] == "—"
    assert rows(section, "Not finished")["weight norm"]["progress"] == "epoch 0 of 4"


def test_null_metrics_leave_gaps(run):
    metrics = [{"epoch": e, "train_error": None if e == 2 else 0.5} for e in (1, 2, 3)]
    section = classify.section([run(metrics=metrics), run(seed=2)])
    assert math.isnan(plot(section, "cpu-train-error").lines[0].y[1])
    assert rows(section, "Errors")["weight norm"]["n"] == "2"


def test_each_preset_has_its_own_part(run):
    section = classify.section([run(), run(label="cpu+epochs=3", epochs=3)])
    assert [part.title for part in section.content] == ["classify: cpu", "classify: cpu+epochs=3"]
    assert len({one.name for one in section.figures}) == len(section.figures) == 8


def test_settings_table_shows_common_and_differing_values(run):
    same = settings([run(), run(seed=2)])
    assert dict(same.rows) | {"width": "0.25", "threads": "2", "limit": "none"} == dict(same.rows)
    assert dict(same.rows)["seed"] == "1 (n = 1), 2 (n = 1)"
    assert same.notes == ()
    other = settings([run(seed=3), run(seed=10, width=1.0, session={"commit": "fedcba+"})])
    assert dict(other.rows)["seed"] == "3 (n = 1), 10 (n = 1)"
    assert dict(other.rows)["width"] == "0.25 (n = 1), 1 (n = 1)"
    assert other.notes[0] == "The runs differ in: width, commit."
    assert "uncommitted" in other.notes[1]


def test_a_run_resumed_elsewhere_counts_for_both_machines(run):
    record = run()
    record.sessions.append({**record.sessions[0], "machine": "B machine"})
    found = dict(settings([record, run(seed=2)]).rows)
    assert found["machine"] == "A machine (n = 2), B machine (n = 1)"


def test_an_unknown_experiment_shows_every_metric(run):
    records = [
        run(experiment="vae", seed=seed, parameterization=kind, result={"bound": -80.0 - seed})
        for kind in ("weight-norm", "standard")
        for seed in (1, 2)
    ]
    section = generic.section(records)
    assert [one.title for one in section.figures][:2] == ["Train loss", "Train error"]
    assert {one.title for one in section.figures} >= {"V norm", "Seconds", "Test loss"}
    drawn = plot(section, "vae-cpu-train-error").lines
    names = ["parameterization weight-norm, n = 2", "parameterization standard, n = 2"]
    assert [line.name for line in drawn] == names
    assert [line.style for line in drawn] == [STYLES["weight-norm"], STYLES["standard"]]
    found = rows(section, "Results")["parameterization standard"]
    assert (found["bound"], found["n"]) == ("−81.5000 ± 0.7071", "2")


def test_an_unknown_experiment_without_parameterizations(run):
    records = [run(experiment="bench", parameterization=None, width=w) for w in (1.0,)]
    assert [line.name for line in plot(generic.section(records), "train-loss").lines] == [
        "all runs, n = 1"
    ]
    records += [run(experiment="bench", parameterization=None, width=2.0, seed=2)]
    drawn = plot(generic.section(records), "train-loss").lines
    assert [line.name for line in drawn] == ["width 1.0, n = 1", "width 2.0, n = 1"]
    assert len({line.style.color for line in drawn}) == 2


def test_plot_has_a_text_alternative(run):
    alt = plot(classify.section([run(end=0.25)]), "cpu-train-error").alt
    assert "training error, % against epoch" in alt
    assert alt.endswith("weight norm, lr 0.003, n = 1: 81.3 to 25.")


@pytest.mark.parametrize("text", ["../../etc/passwd", "", "‖v‖", "a" * 400, ".."])
def test_a_slug_is_a_safe_file_name(text):
    assert 0 < len(slug(text)) <= 150
    assert "/" not in slug(text)
    assert not slug(text).startswith(".")


@pytest.mark.parametrize(
    ("experiment", "metric"),
    [
        (classify, "error"),
        (vae, "negative_elbo"),
        (draw, "negative_elbo"),
        (language, "bits_per_byte"),
    ],
)
def test_learning_rates_are_compared_by_training_not_by_test(run, experiment, metric):
    name = experiment.__name__.rpartition(".")[2]
    records = []
    for rate, train, test in ((0.001, 1.0, 3.0), (0.003, 2.0, 1.0)):
        ends = {f"train_{metric}": train, f"test_{metric}": test}
        rows = [{"epoch": epoch, "seconds": 1.0, **ends} for epoch in (1, 2, 3, 4)]
        config = {"learning_rate": rate, "optimizer": "adamw", "steps": 10}
        records.append(run(experiment=name, metrics=rows, result=ends, **config))
    lines = [
        line.name
        for figure in experiment.section(records).figures
        for plot in getattr(figure, "plots", (figure,))
        for line in getattr(plot, "lines", ())
    ]
    drawn = [line for line in lines if ", lr " in line]
    assert drawn
    assert all(", lr 0.001, " in line for line in drawn)
