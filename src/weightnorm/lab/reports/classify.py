"""Report section of experiment 1, CIFAR-10 classification: figure 1, errors, ‖v‖, time."""

from __future__ import annotations

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import final, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Plot, Section, Table, slug
from weightnorm.lab.reports.provenance import config_values, deviations, settings
from weightnorm.lab.reports.run_grid import RunGrid, finished, run_grids
from weightnorm.lab.reports.style import STYLES, ordered, style_of
from weightnorm.lab.reports.tables import (
    difference_table,
    epochs_sentence,
    epochs_table,
    epochs_to_common,
    final_values,
    times,
    unfinished,
)

PAPER_ERROR = {
    "standard": "8.43",
    "batch-norm": "8.05",
    "weight-norm": "8.46",
    "mean-only-batch-norm": "8.52",
    "weight-norm-mean-only": "7.31",
}
PUBLISHED_ERROR = {
    "Maxout": "11.68",
    "Network in Network": "10.41",
    "Deeply Supervised": "9.6",
    "ConvPool-CNN-C": "9.31",
    "ALL-CNN-C": "9.08",
}
PAPER_TIME = {"standard": "1", "batch-norm": "1.16", "weight-norm": "not noticeably above 1"}
PAPER_SIZE = {"width": "1", "epochs": "200", "limit": "none"}
HOW = ("lr", "epochs")
NO_RUNS = ("—",) * 5


def section(records: list[RunRecord]) -> Section:
    """Describe experiment 1, one part for each preset."""
    return Section(
        "Classification with five parameterizations",
        "ConvPool-CNN-C trained in five parameterizations (section 5.1 of the paper), each at the "
        "learning rate with the lowest mean training error at the end.",
        tuple(map(part, run_grids(records, metric="train_error"))),
    )


def part(runs: RunGrid) -> Section:
    """Describe the runs of one preset."""

    def curves(metric: str, title: str, y: str, percent: bool = False) -> Plot:
        drawn = best_lines(runs, metric, scale=100 if percent else 1)
        name = slug(f"classify {runs.label} {metric}")
        return Plot(name, title, line_caption(drawn), "epoch", y, drawn, from_zero=percent)

    content = [
        curves("train_error", "Training error (the paper's figure 1)", "training error, %", True),
        curves("test_error", "Test error", "test error, %", True),
        errors(runs),
        *epochs_table(runs, "train_error", "training error", 100, " %"),
        *difference_table(runs, "test_error", "test error (percentage points)", 100),
        *unfinished(runs),
        curves("v_norm", "Length of v", "‖v‖, mean over units"),
        curves("effective_step", "Effective step", "g/‖v‖, mean over units"),
        *learning_rates(runs),
        times(runs, PAPER_TIME),
        settings(runs.records),
    ]
    visible = (item for item in content if isinstance(item, Table) or item.lines)
    title = f"classify: {runs.label}"
    return Section(title, f"{_data(runs)}. {runs.progress}", tuple(visible), findings(runs))


def findings(runs: RunGrid) -> tuple[str, ...]:
    """Summarize the final errors in a sentence."""
    if not runs.best_finished:
        return ()
    epochs = " or ".join(sorted(config_values(runs.records, "epochs")))
    place = f"{_data(runs)} ({runs.label}), {epochs} epochs"
    train = final_values(runs, "train_error", 100, digits=1)
    test = final_values(runs, "test_error", 100, digits=1)
    return (
        f"{place}: final training error in %: {train}.",
        f"{place}: final test error in %: {test}.",
        *epochs_sentence(runs, "train_error", "training error", 100, " %"),
    )


def epochs_comparison(records: list[RunRecord]) -> str:
    """Compare in two sentences the epochs that each parameterization needs to the same error.

    The empty string if there are fewer than two parameterizations.
    """
    (runs,) = run_grids(records, metric="train_error")
    target, needed = epochs_to_common(runs, "train_error")
    if not needed:
        return ""
    seeds = max(epochs.n for epochs in needed.values())
    texts = [f"{runs.name(kind)} {epochs.text(digits=1)}" for kind, epochs in needed.items()]
    return (
        f"Every run reaches a training error of {100 * target:.1f} %. Epochs needed for it, mean "
        f"± standard deviation over {seeds} seeds: {', '.join(texts)}."
    )


def errors(runs: RunGrid) -> Table:
    """Tabulate final errors, beside the paper's and the published ones where comparable."""
    cifar10 = _cifar10(runs)
    rows: list[tuple[str, ...]] = []
    for kind in ordered({*runs.best, *(STYLES if cifar10 else ())}):
        test, train, n, *how = _ends(*runs.best[kind]) if kind in runs.best else NO_RUNS
        rows.append((style_of(kind).name, train, test, n, PAPER_ERROR.get(kind, "—"), *how))
    for name, error in PUBLISHED_ERROR.items() if cifar10 else ():
        rows.append((f"{name} (published)", "—", "—", "—", error, "—", "—"))
    head: tuple[str, ...]
    head = ("parameterization", "training error, %", "test error, %", "n", "paper, test, %", *HOW)
    notes = ["Mean ± standard deviation over n finished runs, at the last epoch."]
    if not cifar10:
        notes.append("The paper's and the published errors are for CIFAR-10, so not shown here.")
        head, *rows = [(*row[:4], *row[5:]) for row in (head, *rows)]
    elif other := deviations(runs.records, PAPER_SIZE):
        notes.append(f"The paper's runs: width 1, 200 epochs, all training data. These: {other}.")
    return Table("Errors", head, tuple(rows), tuple(notes))


def learning_rates(runs: RunGrid) -> list[Plot | Table]:
    """Show final errors by learning rate, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    made = {
        "train_error": ("Training error by learning rate", "final training error, %", 100),
        "train_loss": ("Training loss by learning rate", "final training loss, nats", 1),
    }
    plots = []
    for metric, (title, y, scale) in made.items():
        drawn = rate_lines(runs, metric, scale)
        name = slug(f"classify {runs.label} rate {metric}")
        plots.append(
            Plot(
                name,
                title,
                line_caption(drawn),
                "learning rate",
                y,
                drawn,
                log_x=True,
                from_zero=True,
            )
        )
    rows = tuple(
        (style_of(kind).name, f"{rate:g}", *_ends(rate, records)[:3])
        for kind, rates in runs.grid.items()
        for rate, records in rates.items()
    )
    head = ("parameterization", "lr", "test error, %", "training error, %", "n")
    return [*plots, Table("Every learning rate", head, rows)]


def _ends(rate: float, records: list[RunRecord]) -> tuple[str, str, str, str, str]:
    done = finished(records)
    test, train = (stat(final(r, metric) for r in done) for metric in ("test_error", "train_error"))
    epochs = " or ".join(sorted(config_values(records, "epochs")))
    return test.text(100), train.text(100), str(len(done)), f"{rate:g}", epochs


def _data(runs: RunGrid) -> str:
    return "CIFAR-10" if _cifar10(runs) else "Digits, not CIFAR-10"


def _cifar10(runs: RunGrid) -> bool:
    return set(config_values(runs.records, "data")) == {"cifar10"}
