"""Settings of an experiment, and their tables as data frames of text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from weightnorm.lab.records import RunRecord
from weightnorm.lab.report.experiments import EXPERIMENTS, Experiment, metric_of
from weightnorm.lab.report.pictures import Picture
from weightnorm.lab.report.style import STYLES, Style, slug
from weightnorm.lab.results import (
    Comparison,
    mean_and_std,
    run_frame,
    setting_labels,
    signed,
    text,
)
from weightnorm.lab.statistics import Interval

ENVIRONMENT = (
    "machine",
    "device",
    "threads",
    "ranks",
    "torch",
    "python",
    "weightnorm",
    "commit",
)
MISSING = "not recorded"
Row = dict[str, str]


@dataclass(frozen=True, eq=False)
class Item:
    """A table, figure or picture with its title and notes."""

    title: str
    body: pd.DataFrame | Callable[[], Figure] | Picture
    """A figure is drawn when it is needed."""
    notes: Sequence[str] = ()
    folded: bool = False
    """Whether the page shows it only on request."""
    name: str = ""
    """Name of a figure's file, without extension."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Setting(Comparison):
    """Runs of one experiment that differ in method, learning rate and seed."""

    experiment: str
    about: Experiment
    value: str
    """Of the field `Experiment.by`, such as the data set."""
    label: str
    """Preset, and what differs from it."""

    @property
    def where(self) -> str:
        return f"{self.about.names.get(self.value, self.value)}, {self.label}".removeprefix(", ")

    @property
    def title(self) -> str:
        return f"{self.experiment}: {self.where}"

    @property
    def name(self) -> str:
        return slug(self.title)

    @property
    def progress(self) -> str:
        states = Counter(self.runs["state"])
        return ", ".join(f"{n} run{'s' * (n != 1)} {state}" for state, n in states.items())

    def style(self, method: str) -> Style:
        """Return the style of a method; an unknown one has the color of its place."""
        others = [*STYLES.values()]
        other = others[self.methods.index(method) % len(others)]._replace(name=method)
        return self.about.styles.get(method, other)

    @cached_property
    def config(self) -> pd.DataFrame:
        """Every config field of every run, as text."""
        return as_text(record.config for record in self.runs["record"])

    @cached_property
    def environment(self) -> pd.DataFrame:
        """Machine and versions of every run, of all its sessions where they differ."""
        sessions = (record.sessions or [{}] for record in self.runs["record"])
        return as_text(
            {
                field: " and ".join(dict.fromkeys(text(x.get(field, MISSING)) for x in each))
                for field in ENVIRONMENT
            }
            for each in sessions
        )

    @property
    def data(self) -> str:
        """Return the data set or game, by which published values are chosen."""
        values = self.config.get(self.about.by or "data", pd.Series(dtype=str)).unique()
        return str(values[0]) if len(values) == 1 else ""

    @cached_property
    def judged(self) -> dict[str, tuple[Interval, int]]:
        """Return method → its difference to what it is compared with, and the number of pairs."""
        found = {
            m: self.difference(self.about.judged, m, self.about.baseline(m)) for m in self.done
        }
        return {method: change for method, change in found.items() if change}

    @property
    def compares(self) -> bool:
        """Whether something was run beside what it is compared with."""
        return any(self.about.baseline(method) in self.methods for method in self.methods)

    @property
    def size(self) -> tuple[int, int]:
        """Return the number of seeds that are compared, and of epochs."""
        epochs = max((len(record.metrics) for record in self.runs["record"]), default=0)
        return max((n for _, n in self.judged.values()), default=0), epochs

    def reference(self) -> list[float]:
        """Return the distinct values of the reference, which runs with the same seed share."""
        values = self.values(self.about.reference[1], self.runs)
        return [*dict.fromkeys(x for x in values.values() if not math.isnan(x))]

    def cell(self, column: str, runs: pd.DataFrame) -> str:
        """Format a column over runs."""
        metric, _, part = column.partition(":")
        _, scale, digits = metric_of(metric)
        if part == "shortest":
            return mean_and_std([self.shortest_epoch(runs)], scale, digits)
        return mean_and_std(self.values(column, runs).values(), scale, digits)


def as_text(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    table = pd.DataFrame([{field: text(value) for field, value in row.items()} for row in rows])
    filled: pd.DataFrame = table.fillna(MISSING)
    return filled


def settings(experiment: str, records: Sequence[RunRecord]) -> list[Setting]:
    """Split the runs of an experiment into settings."""
    about, runs = EXPERIMENTS[experiment], run_frame(records)
    known = [*about.styles]
    runs["method"] = [about.method(record.config) for record in runs["record"]]
    runs["value"] = [text(record.config.get(about.by, "")) for record in runs["record"]]
    runs["place"] = [known.index(m) if m in known else len(known) for m in runs["method"]]
    found = []
    for value, group in runs.sort_values("place", kind="stable").groupby("value"):
        labels = setting_labels(group, about.method_fields, about.free_fields)
        for label, one in group.groupby(labels):
            who = {"experiment": experiment, "value": str(value), "label": str(label)}
            found.append(Setting(one, about.rate_metric, about.highest, about=about, **who))
    return sorted(found, key=lambda one: [*about.names, one.value].index(one.value))


def is_main(one: Setting, every: Sequence[Setting]) -> bool:
    """Whether a setting is shown in full: it compares methods, and no other setting of the same
    data or game has more seeds and no fewer epochs. If none compares, all are shown."""
    others = [other.size for other in every if other.value == one.value and other.compares]
    seeds, epochs = one.size
    return not others or (one.compares and not any(n > seeds and m >= epochs for n, m in others))


# — tables —


def verdicts(one: Setting) -> Iterator[Row]:
    """Yield a row of the table of verdicts for each method that is compared with another."""
    metric, _, part = one.about.judged.partition(":")
    label, scale, digits = metric_of(metric)
    for method, (change, n) in one.judged.items():
        baseline = one.about.baseline(method)
        yield {
            "part": one.name,
            "title": one.title,
            "measured": label if part == "last epoch" else f"{label}, {part}",
            "method": one.style(method).name,
            "ours": one.cell(one.about.judged, one.done[method]),
            "standard": one.cell(one.about.judged, one.done[baseline]),
            "difference": signed(scaled(change, scale), digits),
            "mark": mark(change, one.highest),
            "n": str(n),
        }


def mark(change: Interval, highest: bool) -> str:
    """Return ▲ for better and ▼ for worse, hollow if the interval includes 0 or n = 1.

    >>> mark(Interval(-1.0, -1.5, -0.5), highest=False), mark(Interval(-1.0, -2.5, 0.5), True)
    ('▲', '▽')
    """
    if math.isnan(change.value) or change.value == 0:
        return "–"
    shown = change.low < change.high and (change.low > 0 or change.high < 0)
    better = (change.value > 0) == highest
    return ("▲" if better else "▼") if shown else ("△" if better else "▽")


def scaled(interval: Interval, scale: float) -> Interval:
    low, high = sorted((interval.low * scale, interval.high * scale))
    return Interval(interval.value * scale, low, high)


def results(one: Setting) -> Iterator[Item]:
    """Yield the tables of final values, the first beside the paper's and published ones."""
    first, *_ = one.about.results
    for title, every in one.about.results.items():
        columns = {head: column for head, column in every.items() if one.has(column)}
        rows = [result_row(one, method, columns, title == first) for method in one.methods]
        if title == first:
            rows += other_rows(one, columns)
        if columns:
            notes = result_notes(one) if title == first else ()
            yield Item(title, frame(rows), notes, folded=title != first)


def result_row(one: Setting, method: str, columns: Mapping[str, str], first: bool) -> Row:
    runs, paper = one.finished(method), one.about.paper.get(one.data, {})
    cells = {head: one.cell(column, runs) for head, column in columns.items()}
    row = {"method": one.style(method).name, **cells, "n": str(len(runs))}
    if paper and first:
        row[one.about.paper_head] = paper.get(method, "—")
    epochs = sorted({text(r.config.get("epochs")) for r in one.at(method)["record"]})
    return row | {"lr": f"{one.best[method]:g}", "epochs": " or ".join(epochs)}


def other_rows(one: Setting, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of the reference, and of published results."""
    about = one.about
    if values := one.reference():
        metric = one.metric if one.highest else about.judged.partition(":")[0]
        head = next(head for head, column in columns.items() if column == metric)
        _, scale, digits = metric_of(columns[head])
        yield {"method": about.reference[0], head: mean_and_std(values, scale, digits)}
    for method, value in about.paper.get(one.data, {}).items():
        if method not in one.methods:
            yield {"method": about.styles[method].name, about.paper_head: value}
    for name, (head, value) in about.published.get(one.data, {}).items():
        yield {"method": name, head: value}


def result_notes(one: Setting) -> list[str]:
    """Return the notes with config fields filled in, and what differs from the paper's size."""
    about = one.about
    words = {str(field): " or ".join(sorted(x.unique())) for field, x in one.config.items()}
    found = [note.format(**words) for note in about.notes]
    changed = {
        field: (value, words.get(field, MISSING))
        for field, value in about.paper_size.items()
        if words.get(field, MISSING) != value
    }
    if changed and not one.label.startswith("demo"):
        usual, other = (
            ", ".join(f"{field.replace('_', ' ')} {x[i]}" for field, x in changed.items())
            for i in (0, 1)
        )
        found.append(f"The paper's preset has {usual}; these runs: {other}.")
    return found


def differences(one: Setting) -> Iterator[Item]:
    """Yield how each method differs from what it is compared with, in parts of training."""
    about, rows = one.about, []
    metric = about.judged.partition(":")[0]
    label, scale, digits = metric_of(metric)
    for method in one.methods:
        baseline = about.baseline(method)
        found = {
            part: change
            for part in ("first quarter", "all epochs", "last quarter", "last epoch")
            if (change := one.difference(f"{metric}:{part}", method, baseline))
        }
        if found:
            row = {"method": one.style(method).name}
            if about.baselines:
                row["compared with"] = one.style(baseline).name
            cells = {part: signed(scaled(x, scale), digits) for part, (x, _) in found.items()}
            rows.append({**row, **cells, "n": str(max(n for _, n in found.values()))})
    what, _, unit = label.partition(", ")
    note = (
        f"Mean {what}{unit and f' ({unit})'} of these epochs minus that of "
        f"{'the other method' if about.baselines else 'standard'} with the same seed: mean over n "
        "seeds [95 % interval]."
    )
    if rows:
        title = "Difference" + " to standard" * (not about.baselines)
        yield Item(title, frame(rows), [note], folded=True)


def epochs_to_common(one: Setting) -> Iterator[Item]:
    """Yield the epochs that each method needs to the value that every finished run reaches."""
    if one.highest:  # scores have no common value that all runs reach from above
        return
    metric = one.about.curves[0]
    target, needed = one.epochs_to_common(metric)
    if needed:
        label, scale, _ = metric_of(metric)
        what, _, unit = label.partition(", ")
        value = f"{scale * target:.2f} {unit}".replace("-", "−")
        rows = [
            {
                "method": one.style(method).name,
                f"epochs to {value}": mean_and_std(epochs, digits=1),
                "n": str(sum(not math.isnan(x) for x in epochs)),
            }
            for method, epochs in needed.items()
        ]
        note = (
            f"First epoch with a {what} of {value} or better, which every finished run "
            "reaches; mean ± standard deviation over n runs."
        )
        yield Item(f"Epochs to the same {what}", frame(rows), [note], folded=True)


def epochs_comparison(records: Sequence[RunRecord]) -> str:
    """Compare in two sentences the epochs that each method of `classify` needs to the same error.

    The empty string if there are fewer than two methods.
    """
    (one,) = settings("classify", records)
    target, needed = one.epochs_to_common("train_error")
    if not needed:
        return ""
    texts = [f"{one.style(m).name} {mean_and_std(x, digits=1)}" for m, x in needed.items()]
    return (
        f"Every run reaches a training error of {100 * target:.1f} %. Epochs needed for it, mean "
        f"± standard deviation over {max(map(len, needed.values()))} seeds: {', '.join(texts)}."
    )


def every_rate(every: Sequence[Setting], title: str) -> Iterator[Item]:
    """Yield the final values at every learning rate of all settings."""
    rows = []
    for one in every:
        columns = next(iter(one.about.results.values()))
        kept = {k: x for k, x in columns.items() if one.has(x) and "shortest" not in x}
        for method, rate in one.rates:
            if len(runs := one.finished(method, rate)):
                cells = {head: one.cell(column, runs) for head, column in kept.items()}
                place = {"setting": one.where} if len(every) > 1 else {}
                row = {"method": one.style(method).name, "lr": f"{rate:g}"}
                rows.append({**place, **row, **cells, "n": str(len(runs))})
    if rows:
        yield Item(title, frame(rows), folded=True)


def provenance(one: Setting) -> Item:
    """Tabulate all fields of the config, the machine and the versions, over all runs."""
    table = one.config.drop(columns=[*ENVIRONMENT], errors="ignore").join(one.environment)
    varied = ("parameterization", "learning_rate", "seed")
    changed = [x for x in table if table[x].nunique() > 1 and x not in varied]
    words = [f"The runs differ in: {', '.join(changed).replace('_', ' ')}."] if changed else []
    if table["commit"].str.contains("+", regex=False).any():
        words.append("+ after a commit: the code had uncommitted changes.")
    head = f"value (n = {len(table)} run{'s' * (len(table) != 1)})"
    rows = [{"setting": x.replace("_", " "), head: shown(table[x])} for x in table]
    return Item("Settings and machine", frame(rows), words, folded=True)


def shown(values: pd.Series[str]) -> str:
    """List values with the number of runs that have them, numbers in order.

    >>> shown(pd.Series(["10", "3", "3"]))
    '3 (n = 2), 10 (n = 1)'
    """
    counts = Counter(values)
    if len(counts) == 1:
        return str(values.iloc[0])
    ordered = sorted(counts, key=lambda x: (len(x) if x.isdecimal() else math.inf, x))
    return ", ".join(f"{value} (n = {counts[value]})" for value in ordered)


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a frame of text; a dash where a row lacks a column."""
    found: pd.DataFrame = pd.DataFrame(rows).fillna("—")
    return found


def numeric_columns(table: pd.DataFrame) -> list[bool]:
    """Return for each column but the first whether its cells are numbers, aligned right.

    >>> numeric_columns(frame([{"method": "a", "loss": "−0.1 ± 0.2"}, {"method": "b"}]))
    [False, True]
    """
    return [False, *(bool(table[name].str.match(r"[−+]?\d|—").all()) for name in [*table][1:])]


# — Markdown —

INTERVAL = re.compile(r"(?: |&nbsp;)\[([-−+\d.∞]+),(?: |&nbsp;)([-−+\d.∞]+)\]")


def markdown(table: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """Render a table with its notes below it.

    >>> print(markdown(pd.DataFrame({"name": ["|x|"], "n": ["3"]}), ["Mean over n."]))
    | name | n |
    |---|--:|
    | \\|x\\| | 3 |
    <BLANKLINE>
    Mean over n.
    """
    align = ["--:" if numeric else "---" for numeric in numeric_columns(table)]
    rows = [[*table.columns], *table.to_numpy().tolist()]
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    lines.insert(1, f"|{'|'.join(align)}|")
    return "\n".join([*lines, *(f"\n{note}" for note in notes)])


def _cell(content: str) -> str:
    """Escape a cell; intervals are set in small type, so that tables of ratios fit a screen.

    >>> _cell("1.02 [0.99, 1.05]\\n2")
    '1.02&nbsp;<sub>0.99‑1.05</sub><br>2'
    >>> _cell("−0.1 [−0.3, +0.1]")
    '−0.1&nbsp;<sub>[−0.3,&nbsp;+0.1]</sub>'
    """

    def small(match: re.Match[str]) -> str:
        if match[1][0] in "-−+":  # where a dash would be ambiguous
            return f"&nbsp;<sub>[{match[1]},&nbsp;{match[2]}]</sub>"
        return f"&nbsp;<sub>{match[1]}\N{NON-BREAKING HYPHEN}{match[2]}</sub>"

    content = content.replace("|", r"\|").replace("\N{NO-BREAK SPACE}", "&nbsp;")
    content = INTERVAL.sub(small, content).replace(" ± ", "&nbsp;±&nbsp;")
    return content.replace("\n", "<br>")
