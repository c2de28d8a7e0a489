"""Report section of an experiment without its own: all metrics and results."""

from __future__ import annotations

import json

from weightnorm.lab.records import Row, RunRecord
from weightnorm.lab.reports.aggregate import final, finite_or_nan, stat
from weightnorm.lab.reports.curves import line_caption, lines
from weightnorm.lab.reports.document import Plot, Section, Table, slug
from weightnorm.lab.reports.provenance import settings
from weightnorm.lab.reports.run_grid import finished, grouped, label
from weightnorm.lab.reports.style import STYLES, Style, style_of

Groups = dict[str, list[RunRecord]]


def section(records: list[RunRecord]) -> Section:
    """Describe any experiment, one part for each preset."""
    name = records[0].experiment
    parts = (part(name, *group) for group in sorted(grouped(records, label).items()))
    return Section(f"Experiment {name}", "All recorded metrics.", tuple(parts))


def part(experiment: str, preset: str, records: list[RunRecord]) -> Section:
    """Describe the runs of one preset; runs that differ only in the seed are averaged."""
    groups = named_groups(records)
    metrics = dict.fromkeys(key for record in records for row in record.metrics for key in row)
    plots = (plot(experiment, preset, metric, groups) for metric in metrics if metric != "epoch")
    intro = f"{len(finished(records))} of {len(records)} runs are finished."
    visible = [item for item in plots if item.lines]
    content: list[Plot | Table] = [*visible, results(groups), settings(records)]
    return Section(f"{experiment}: {preset}", intro, tuple(content))


def plot(experiment: str, preset: str, metric: str, groups: Groups) -> Plot:
    words = metric.replace("_", " ")
    drawn = tuple(
        line
        for name, one in zip(groups, group_styles(groups), strict=True)
        for line in lines(groups[name], metric, one, name)
    )
    file = slug(f"{experiment} {preset} {metric}")
    return Plot(file, words.capitalize(), line_caption(drawn), "epoch", words, drawn)


def results(groups: Groups) -> Table:
    """Tabulate the results of finished runs."""
    done = {name: finished(records) for name, records in groups.items()}
    keys = dict.fromkeys(
        key
        for records in done.values()
        for record in records
        for key, value in (record.result or {}).items()
        if finite_or_nan(value) == finite_or_nan(value)
    )
    rows = tuple(
        (
            name,
            *(stat(final(r, key) for r in records).text(digits=4) for key in keys),
            f"{len(records)}",
        )
        for name, records in done.items()
    )
    return Table("Results", ("runs", *(key.replace("_", " ") for key in keys), "n"), rows)


def named_groups(records: list[RunRecord]) -> Groups:
    """Group runs that differ only in the seed; groups are named by the fields that differ."""
    groups = [*grouped(records, lambda r: json.dumps(_but_seed(r), sort_keys=True)).values()]
    configs = [_but_seed(group[0]) for group in groups]
    fields = [
        field
        for field in dict.fromkeys(field for config in configs for field in config)
        if len({json.dumps(config.get(field)) for config in configs}) > 1
    ]
    return {
        ", ".join(f"{f.replace('_', ' ')} {config.get(f)}" for f in fields) or "all runs": group
        for config, group in zip(configs, groups, strict=True)
    }


def group_styles(groups: Groups) -> list[Style]:
    """Return the style of each group: its parameterization's if these differ, else one by one."""
    kinds = [str(group[0].config.get("parameterization")) for group in groups.values()]
    if len(set(kinds)) == len(kinds) and set(kinds) <= set(STYLES):
        return [style_of(kind) for kind in kinds]
    return [style_of(name, index) for index, name in enumerate(groups)]


def _but_seed(record: RunRecord) -> Row:
    return {field: value for field, value in record.config.items() if field != "seed"}
