"""Report section of experiment 5, the language model: bits per byte, ‖v‖, angle of a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from statistics import fmean

from weightnorm.lab.reports.aggregate import curve, final, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Line, Plot, Section, Table, slug
from weightnorm.lab.reports.provenance import settings
from weightnorm.lab.reports.run_grid import RunGrid, finished, grouped, label, parameterization
from weightnorm.lab.reports.style import STYLES, Style
from weightnorm.lab.reports.tables import epochs_sentence, final_values, unfinished
from weightnorm.lab.runs.records import RunRecord

BLUE, GREEN, PURPLE = (
    STYLES[kind].color for kind in ("weight-norm", "weight-norm-mean-only", "mean-only-batch-norm")
)
METHODS = {
    "adamw standard": Style("AdamW", STYLES["standard"].color, "o"),
    "adamw weight-norm": Style("AdamW, weight norm", BLUE, "^"),
    "muon standard": Style("Muon", STYLES["batch-norm"].color, "s"),
    "muon weight-norm": Style("Muon, weight norm (Muown)", GREEN, "v"),
    "hyperball weight-norm": Style("Adam, fixed norm (Hyperball)", PURPLE, "D"),
}
RETRACTED = "+retract=True"
RESULT, TRIGRAM = "trigram_bits_per_byte", "trigram model"


def method(record: RunRecord) -> str:
    """Return optimizer and parameterization, with a mark if ‖v‖ is restored after every step."""
    name = f"{record.config.get('optimizer', 'unknown')} {parameterization(record)}"
    return name + RETRACTED * bool(record.config.get("retract"))


def label_without_retraction(record: RunRecord) -> str:
    """Return the label without `retract`, which is a curve of its own."""
    preset, _, changes = label(record).partition("+")
    kept = [change for change in changes.split(",") if change not in ("", "retract=True")]
    return "+".join([preset, ",".join(kept)]) if kept else preset


def section(records: list[RunRecord]) -> Section:
    """Describe experiment 5, one part for each preset."""
    styles = METHODS | {
        f"{kind}{RETRACTED}": replace(style, name=f"{style.name}, ‖v‖ restored")
        for kind, style in METHODS.items()
    }
    grids = [
        RunGrid(name, runs, "train_bits_per_byte", kind=method, styles=styles)
        for name, runs in sorted(grouped(records, label_without_retraction).items())
    ]
    return Section(
        "Language model (beyond the paper)",
        "A byte-level transformer on the Python source of torch, with weight norm in the optimizer "
        "of its blocks' matrices. Each method at the learning rate with the lowest mean training "
        "loss at the end. Lower is better.",
        tuple(map(part, grids)),
    )


def part(runs: RunGrid) -> Section:
    """Describe the runs of one preset."""

    def curves(metric: str, title: str, y: str) -> Plot:
        drawn = best_lines(runs, metric)
        name = slug(f"language {runs.label} {metric}")
        return Plot(name, title, line_caption(drawn), "epoch", y, drawn)

    content: list[Plot | Table] = [
        curves("test_bits_per_byte", "Held-out text, at equal steps", "bits per byte"),
        against_minutes(runs),
        curves("train_bits_per_byte", "Training text", "bits per byte"),
        results(runs),
        *unfinished(runs),
        curves("v_norm", "Length of v", "‖v‖, mean over units"),
        curves("step_angle", "Angle of a step", "radians, mean over units"),
        *learning_rates(runs),
        settings(runs.records),
    ]
    visible = (item for item in content if isinstance(item, Table) or item.lines)
    return Section(f"language: {runs.label}", runs.progress, tuple(visible), findings(runs))


def findings(runs: RunGrid) -> tuple[str, ...]:
    """Summarize the results in two sentences."""
    if not runs.best_finished:
        return ()
    values = final_values(runs, "test_bits_per_byte", digits=3)
    trigram = "".join(f", {TRIGRAM} {value:.3f}" for value in trigram_values(runs))
    return (
        f"Language model ({runs.label}): bits per byte of held-out text: {values}{trigram}.",
        *epochs_sentence(runs, "test_bits_per_byte", "held-out bits per byte", 1, ""),
    )


def trigram_values(runs: RunGrid) -> list[float]:
    """Return the bits per byte of a trigram model: one value, if all runs have the same text."""
    values = (r.result.get(RESULT) for rs in runs.best_finished.values() for r in rs if r.result)
    return sorted({value for value in values if value is not None})


def against_minutes(runs: RunGrid) -> Plot:
    """Plot the held-out bits per byte of finished runs against the mean time of training."""
    drawn = []
    for kind, records in runs.best_finished.items():
        rate, _ = runs.best[kind]
        done = curve(records, "test_bits_per_byte")
        elapsed = [list(accumulate(row["seconds"] for row in r.metrics)) for r in records]
        minutes = tuple(fmean(run[int(epoch) - 1] for run in elapsed) / 60 for epoch in done.x)
        name = f"{runs.name(kind)}, lr {rate:g}, n = {done.n}"
        spread = done.std if done.n > 1 else ()
        drawn.append(Line(name, runs.style(kind), minutes, done.mean, spread))
    return Plot(
        slug(f"language {runs.label} test bits per byte against minutes"),
        "Held-out text, at equal time",
        line_caption(tuple(drawn)),
        "minutes of training on one core",
        "bits per byte",
        tuple(drawn),
    )


def results(runs: RunGrid) -> Table:
    """Tabulate the final bits per byte of each method at its best learning rate."""
    rows = []
    for kind, (rate, records) in runs.best.items():
        done = finished(records)
        metrics = ("train_bits_per_byte", "test_bits_per_byte")
        train, test = (stat(final(r, metric) for r in done) for metric in metrics)
        seconds = stat(sum(row["seconds"] for row in r.metrics) / 60 for r in done)
        values = (train.text(digits=3), test.text(digits=3), str(len(done)), f"{rate:g}")
        rows.append((runs.name(kind), *values, seconds.text(digits=1)))
    if trigram := trigram_values(runs):
        rows.append((TRIGRAM, "—", stat(trigram).text(digits=3), "—", "—", "—"))
    head = ("method", "training", "held-out", "n", "lr", "minutes")
    note = "Bits per byte after the last epoch: mean ± standard deviation over n finished runs."
    return Table("Bits per byte", head, tuple(rows), (note,))


def learning_rates(runs: RunGrid) -> list[Plot]:
    """Plot the final training loss by learning rate, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    drawn = rate_lines(runs, "train_bits_per_byte")
    name, title = slug(f"language {runs.label} rate"), "Training text by learning rate"
    y, x = "final bits per byte", "learning rate of the directions"
    return [Plot(name, title, line_caption(drawn), x, y, drawn, log_x=True)]
