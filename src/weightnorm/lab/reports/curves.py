"""Lines of a plot from groups of runs: finished ones as mean and band, unfinished ones dashed."""

from __future__ import annotations

from weightnorm.lab.reports.aggregate import Curve, curve, final, stat
from weightnorm.lab.reports.document import Line
from weightnorm.lab.reports.run_grid import RunGrid, finished
from weightnorm.lab.reports.style import Style, style_of
from weightnorm.lab.runs.records import RunRecord


def line_caption(drawn: tuple[Line, ...]) -> str:
    """How to read the lines."""
    words = ["line: mean over n finished runs"] * any(not line.unfinished for line in drawn)
    words += ["band: ± standard deviation"] * any(line.spread for line in drawn)
    words += ["dashed: not finished"] * any(line.unfinished for line in drawn)
    text = "; ".join(words)
    return f"{text[:1].upper()}{text[1:]}."


def lines(
    records: list[RunRecord], metric: str, style: Style, name: str, scale: float = 1
) -> list[Line]:
    """The finished runs as one line, each unfinished one as its own; none without the metric."""
    done = curve(finished(records), metric)
    drawn = [_line(done, f"{name}, n = {done.n}", style, scale)] if done.n else []
    for record in records:
        if not record.finished and (one := curve([record], metric)).n:
            title = f"{name}, seed {record.config.get('seed', '?')}: unfinished, {progress(record)}"
            drawn.append(_line(one, title, style, scale, unfinished=True))
    return drawn


def best_lines(runs: RunGrid, metric: str, scale: float = 1) -> tuple[Line, ...]:
    """A metric over epochs, for each parameterization at its best learning rate."""
    return tuple(
        line
        for kind, (rate, records) in runs.best.items()
        for line in lines(
            records, metric, style_of(kind), f"{style_of(kind).name}, lr {rate:g}", scale
        )
    )


def rate_lines(runs: RunGrid, metric: str, scale: float = 1) -> tuple[Line, ...]:
    """A metric at the end of finished runs against the learning rate."""
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
        name = f"{style_of(kind).name}, n = {n} at each rate"
        drawn.append(
            Line(name, style_of(kind), tuple(ends), mean, spread if counts[-1] > 1 else ())
        )
    return tuple(drawn)


def progress(record: RunRecord) -> str:
    """How far an unfinished run has come."""
    return f"epoch {len(record.metrics)} of {record.config.get('epochs', '?')}"


def _line(values: Curve, name: str, style: Style, scale: float, unfinished: bool = False) -> Line:
    y = tuple(scale * value for value in values.mean)
    spread = tuple(abs(scale) * value for value in values.std) if values.n > 1 else ()
    return Line(name, style, values.x, y, spread, unfinished)
