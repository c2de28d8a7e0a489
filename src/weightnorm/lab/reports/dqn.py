"""Report section of experiment 4, DQN: figure 4, scores, values, speed, recorded games."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import Stat, epoch_seconds, final, finite_or_nan, series, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Line, Picture, Plot, Section, Table, slug
from weightnorm.lab.reports.pictures import load_arrays
from weightnorm.lab.reports.provenance import MACHINE, deviations, differing_fields, settings
from weightnorm.lab.reports.run_grid import RunGrid, by_setting, finished, grouped
from weightnorm.lab.reports.style import Style, ordered, style_of
from weightnorm.lab.reports.tables import difference_table, final_values, unfinished

METRIC = "best_score"
PUBLISHED = {
    "breakout": ("410", "403", "401"),
    "enduro": ("1,250", "1,448", "302"),
    "seaquest": ("7,188", "7,375", "5,286"),
    "space-invaders": ("1,779", "2,179", "1,975"),
}
"""The paper's standard and weight norm, and Mnih et al. (2015)."""
PAPER_SIZE = {
    "epochs": "200",
    "train_steps": "250000",
    "replay_size": "1000000",
    "epsilon_steps": "1000000",
    "width": "1",
}
RANDOM = Style("random play", "#cc79a7", "x")
SECONDS = 4 / 60
"""Duration of an agent's step: four frames."""


def section(records: list[RunRecord]) -> Section:
    """Describe experiment 4, one part for each preset."""
    return Section(
        "Reinforcement learning: DQN",
        "Deep Q-networks on Atari games (section 5.4 of the paper). A score is the mean return of "
        "the games of a test phase, with unclipped rewards. The result of a run is the best score "
        "over its epochs, as in the paper; it also decides which learning rate is best.",
        tuple(part(*group) for group in by_setting(records, ("game",)).items()),
    )


def part(preset: str, records: list[RunRecord]) -> Section:
    """Describe the runs of one preset: a table of all games, then each game."""
    games = [
        RunGrid(f"{preset} {name}", runs, METRIC, highest=True)
        for name, runs in sorted(grouped(records, game).items())
    ]
    intro = f"{len(finished(records))} of {len(records)} runs are finished."
    parts = tuple(map(of_game, games))
    return Section(f"dqn: {preset}", intro, (scores(games), *parts, settings(records)))


def of_game(runs: RunGrid) -> Section:
    """Describe the runs of one game."""

    def curves(metric: str, title: str, y: str) -> Plot:
        drawn = best_lines(runs, metric)
        name = slug(f"dqn {runs.label} {metric}")
        return Plot(name, title, line_caption(drawn), "epoch", y, drawn)

    content: list[Plot | Picture | Table] = [
        figure_4(runs),
        curves("train_score", "Score in training", "mean return in training"),
        phases(runs),
        *difference_table(runs, "score", "score", digits=0),
        curves("mean_q", "Estimated values", "max Q, mean over the states of the initialization"),
        curves("loss", "Loss", "Huber loss of a transition"),
        *game_pictures(runs),
        *learning_rates(runs),
        *unfinished(runs),
        speeds(runs),
    ]
    visible = (item for item in content if not isinstance(item, Plot) or item.lines)
    name = game(runs.records[0])
    words = runs.progress + ("" if name in PUBLISHED else " The paper does not have this game.")
    return Section(title(name), words, tuple(visible), findings(runs))


def findings(runs: RunGrid) -> tuple[str, ...]:
    """Summarize the best scores in a sentence."""
    if not runs.best_finished:
        return ()
    random = random_play(runs)
    values = final_values(runs, METRIC, digits=0)
    place = f"{title(game(runs.records[0]))} ({runs.label.partition(' ')[0]})"
    return (f"{place}: best epoch's score: {values}; random play {random.text(digits=0)}.",)


def scores(games: list[RunGrid]) -> Table:
    """Tabulate the best score of each game and parameterization, beside the published ones."""
    kinds = ordered({kind for runs in games for kind in runs.grid})
    rows = []
    for runs in games:
        name = game(runs.records[0])
        ours = [_score(*runs.best[kind]) if kind in runs.best else "—" for kind in kinds]
        random = random_play(runs)
        rows.append((title(name), *ours, random.text(digits=0), *PUBLISHED.get(name, ("—",) * 3)))
    names = [style_of(kind).name for kind in kinds]
    papers = ("paper, standard", "paper, weight norm", "Mnih et al.")
    notes = ["The best epoch's score: mean ± standard deviation over n finished runs."]
    if other := deviations([record for runs in games for record in runs.records], PAPER_SIZE):
        notes.append(f"The paper's runs are 200 epochs of 250,000 steps. These: {other}.")
    return Table("Scores", ("game", *names, "random play", *papers), tuple(rows), tuple(notes))


def phases(runs: RunGrid) -> Table:
    """Tabulate scores over parts of training: single epochs are noisy."""

    def mean(metric: str, start: int, stop: int | None = None) -> Callable[[RunRecord], float]:
        def over(record: RunRecord) -> float:
            values = [*series(record, metric).values()]
            first = start if start < 0 else start * len(values) // 2
            last = stop if stop is None else stop * len(values) // 2
            return stat(values[first:last]).mean

        return over

    columns: dict[str, Callable[[RunRecord], float]] = {
        "best epoch": lambda record: final(record, METRIC),
        "first half": mean("score", 0, 1),
        "second half": mean("score", 1),
        "last five": mean("score", -5),
        "last epoch": lambda record: final(record, "score"),
        "training, last five": mean("train_score", -5),
    }
    rows = tuple(
        (
            runs.name(kind),
            *(stat(map(column, done)).text(digits=0) for column in columns.values()),
            str(len(done)),
            f"{runs.best[kind][0]:g}",
        )
        for kind, done in runs.best_finished.items()
    )
    head = ("parameterization", *columns, "n", "lr")
    notes = (
        "Mean score of the test phases of these epochs, and in training of the last five; mean ± "
        "standard deviation over n finished runs.",
    )
    return Table("Scores over training", head, rows, notes)


def random_play(runs: RunGrid) -> Stat:
    """Statistics of the score of random play, which runs with the same seed share."""
    scores = {str(r.config.get("seed")): final(r, "random_score") for r in finished(runs.records)}
    return stat(scores.values())


def figure_4(runs: RunGrid) -> Plot:
    """Plot scores over epochs, with the score of random play."""
    drawn = best_lines(runs, "score")
    caption = line_caption(drawn)
    random = random_play(runs)
    if random.n and drawn:
        ends = min(line.x[0] for line in drawn), max(line.x[-1] for line in drawn)
        name = f"random play, n = {random.n}"
        drawn = (*drawn, Line(name, RANDOM, ends, (random.mean,) * 2))
    name, words = slug(f"dqn {runs.label} score"), "Score per epoch (the paper's figure 4)"
    return Plot(name, words, caption, "epoch", "mean return in testing", drawn)


def learning_rates(runs: RunGrid) -> list[Plot]:
    """Plot the best score by learning rate, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    drawn = rate_lines(runs, METRIC)
    name, words = slug(f"dqn {runs.label} rate"), "Best score by learning rate"
    return [
        Plot(name, words, line_caption(drawn), "learning rate", "best score", drawn, log_x=True)
    ]


def speeds(runs: RunGrid) -> Table:
    """Tabulate steps of the agent per second, over training and testing."""
    done = {kind: finished(records) for kind, (_, records) in runs.best.items()}
    found = {kind: stat(map(_speed, records)) for kind, records in done.items()}
    standard = found.get("standard", stat([]))
    rows = tuple(
        (
            runs.name(kind),
            speed.text(digits=1),
            f"{speed.mean / standard.mean:.2f}" if speed.n and standard.n else "—",
            str(speed.runs),
        )
        for kind, speed in found.items()
    )
    notes = ["Mean ± standard deviation over n finished runs."]
    if names := differing_fields(finished(runs.records), MACHINE):
        notes.append(f"Runs differ in {', '.join(names)}: their times are not comparable.")
    head = ("parameterization", "steps per second", "relative to standard", "n")
    return Table("Speed", head, rows, tuple(notes))


def _speed(record: RunRecord) -> float:
    steps = (finite_or_nan(record.config.get(field)) for field in ("train_steps", "test_steps"))
    seconds = epoch_seconds(record)
    return sum(steps) / seconds if seconds else 0.0


def _score(rate: float, records: list[RunRecord]) -> str:
    done = finished(records)
    best = stat(final(record, METRIC) for record in done)
    return f"{best.text(digits=0)} (lr {rate:g}, n = {len(done)})" if done else "—"


def game_pictures(runs: RunGrid) -> list[Picture]:
    """Show a recorded game of one agent of each parameterization."""
    made = []
    for kind, (_, records) in runs.best.items():
        for record in sorted(finished(records), key=lambda r: finite_or_nan(r.config.get("seed"))):
            frames = load_arrays(record, "game").get("frames", np.empty(0)).astype(np.uint8)
            if frames.ndim == 4 and frames.shape[0] and frames.shape[3] == 3:
                name, of = slug(f"dqn {runs.label} {kind} game"), runs.name(kind)
                seed = record.config.get("seed", "?")
                words = f"Seed {seed}, after the last epoch, from the start of a game."
                made.append(Picture(name, f"A game: {of}", words, frames, SECONDS))
                break
    return made


def game(record: RunRecord) -> str:
    return str(record.config.get("game", "unknown"))


def title(name: str) -> str:
    """Return a game's name with capitals.

    >>> title("space-invaders")
    'Space Invaders'
    """
    return name.replace("-", " ").title()
