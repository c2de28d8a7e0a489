"""Lines of a plot from groups of runs: mean and band of finished runs, dashed unfinished ones."""

from __future__ import annotations

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import Curve, curve, final, stat
from weightnorm.lab.reports.document import Line
from weightnorm.lab.reports.run_grid import RunGrid, finished
from weightnorm.lab.reports.style import Style


def line_caption(drawn: tuple[Line, ...]) -> str:
    """Explain the lines, bands and dashes of a plot."""
    words = ["line: mean over n finished runs"] * any(not line.unfinished for line in drawn)
    words += ["band: ± standard deviation"] * any(line.spread for line in drawn)
    words += ["dashed: not finished"] * any(line.unfinished for line in drawn)
    text = "; ".join(words)
    return f"{text[:1].upper()}{text[1:]}."


def lines(
    records: list[RunRecord], metric: str, style: Style, name: str, scale: float = 1
) -> list[Line]:
    """Return one line for the finished runs and one for each unfinished run that has the metric."""
    done = curve(finished(records), metric)
    drawn = [_line(done, f"{name}, n = {done.n}", style, scale)] if done.n else []
    for record in records:
        if not record.finished and (one := curve([record], metric)).n:
            title = f"{name}, seed {record.config.get('seed', '?')}: unfinished, {progress(record)}"
            drawn.append(_line(one, title, style, scale, unfinished=True))
    return drawn


def best_lines(runs: RunGrid, metric: str, scale: float = 1) -> tuple[Line, ...]:
    """Return a metric over epochs, for each parameterization at its best learning rate."""
    return tuple(
        line
        for kind, (rate, records) in runs.best.items()
        for line in lines(
            records, metric, runs.style(kind), f"{runs.name(kind)}, lr {rate:g}", scale
        )
    )


def rate_lines(runs: RunGrid, metric: str, scale: float = 1) -> tuple[Line, ...]:
    """Return the final value of a metric against the learning rate, over finished runs."""
    drawn = []
    for kind, rates in runs.grid.items():
        ends = {r: stat(final(x, metric) for x in finished(rates[r])) for r in rates if r > 0}
        ends = {r: end for r, end in ends.items() if end.n}
        if not ends:
            continue
        counts = sorted({end.n for end in ends.values()})
        n = "–".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
        mean = tuple(scale * end.mean for end in ends.values())
        spread = tuple(abs(scale) * end.std if end.n > 1 else 0.0 for end in ends.values())
        name = f"{runs.name(kind)}, n = {n} at each rate"
        band = spread if counts[-1] > 1 else ()
        drawn.append(Line(name, runs.style(kind), tuple(ends), mean, band))
    return tuple(drawn)


def progress(record: RunRecord) -> str:
    """Return how many epochs of an unfinished run are done."""
    return f"epoch {len(record.metrics)} of {record.config.get('epochs', '?')}"


def _line(values: Curve, name: str, style: Style, scale: float, unfinished: bool = False) -> Line:
    y = tuple(scale * value for value in values.mean)
    spread = tuple(abs(scale) * value for value in values.std) if values.n > 1 else ()
    return Line(name, style, values.x, y, spread, unfinished)
