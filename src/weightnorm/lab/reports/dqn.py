"""The section of experiment 4, DQN: the paper's figure and table, what the agent expects, how fast
it plays, and a game to watch."""

from __future__ import annotations

import numpy as np

from weightnorm.lab.reports.aggregate import epoch_seconds, final, finite_or_nan, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Line, Picture, Plot, Section, Table, slug
from weightnorm.lab.reports.pictures import load_arrays
from weightnorm.lab.reports.provenance import MACHINE, deviations, differing_fields, settings
from weightnorm.lab.reports.run_grid import RunGrid, finished, grouped, label
from weightnorm.lab.reports.style import Style, ordered, style_of
from weightnorm.lab.reports.tables import unfinished
from weightnorm.lab.runs.records import RunRecord

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
"""Of an agent's step: four frames."""


def section(records: list[RunRecord]) -> Section:
    """Experiment 4, a part for each preset."""
    return Section(
        "Reinforcement learning: DQN",
        "Deep Q-networks on Atari games (section 5.4 of the paper). A score is the mean return of "
        "the games of a test phase, rewards as the game gives them; an agent's is its best over "
        "the epochs, and that chooses the learning rate, too.",
        tuple(part(*group) for group in sorted(grouped(records, label).items())),
    )


def part(preset: str, records: list[RunRecord]) -> Section:
    """The runs of one preset: a table of all games, then each."""
    games = [
        RunGrid(f"{preset} {name}", runs, METRIC, highest=True)
        for name, runs in sorted(grouped(records, game).items())
    ]
    intro = f"{len(finished(records))} of {len(records)} runs are finished."
    parts = tuple(map(of_game, games))
    return Section(f"dqn: {preset}", intro, (scores(games), *parts, settings(records)))


def of_game(runs: RunGrid) -> Section:
    """Everything about the runs of one game."""

    def curves(metric: str, title: str, y: str) -> Plot:
        drawn = best_lines(runs, metric)
        name = slug(f"dqn {runs.label} {metric}")
        return Plot(name, title, line_caption(drawn), "epoch", y, drawn)

    content: list[Plot | Picture | Table] = [
        figure_4(runs),
        curves("train_score", "Score while learning", "mean return in learning"),
        curves("mean_q", "What the agent expects", "max Q, mean over held-out states"),
        curves("loss", "Loss", "Huber loss of a transition"),
        *game_pictures(runs),
        *learning_rates(runs),
        *unfinished(runs),
        speeds(runs),
    ]
    shown = (item for item in content if not isinstance(item, Plot) or item.lines)
    name = game(runs.records[0])
    words = f"{len(finished(runs.records))} of {len(runs.records)} runs are finished."
    words += "" if name in PUBLISHED else " The paper does not have this game."
    return Section(title(name), words, tuple(shown))


# — numbers —


def scores(games: list[RunGrid]) -> Table:
    """The best score of each game and parameterization, beside the published ones."""
    kinds = ordered({kind for runs in games for kind in runs.grid})
    rows = []
    for runs in games:
        name = game(runs.records[0])
        ours = [_score(*runs.best[kind]) if kind in runs.best else "—" for kind in kinds]
        random = stat(final(record, "random_score") for record in finished(runs.records))
        rows.append((title(name), *ours, random.text(digits=0), *PUBLISHED.get(name, ("—",) * 3)))
    names = [style_of(kind).name for kind in kinds]
    papers = ("paper, standard", "paper, weight norm", "Mnih et al.")
    notes = ["The best epoch's score: mean ± standard deviation over n finished runs."]
    if other := deviations([record for runs in games for record in runs.records], PAPER_SIZE):
        notes.append(f"The paper's runs are 200 epochs of 250,000 steps. These: {other}.")
    return Table("Scores", ("game", *names, "random play", *papers), tuple(rows), tuple(notes))


def figure_4(runs: RunGrid) -> Plot:
    """Scores over epochs, and that of random play."""
    drawn = best_lines(runs, "score")
    caption = line_caption(drawn)
    random = stat(final(record, "random_score") for record in finished(runs.records))
    if random.n and drawn:
        ends = min(line.x[0] for line in drawn), max(line.x[-1] for line in drawn)
        name = f"random play, n = {random.n}"
        drawn = (*drawn, Line(name, RANDOM, ends, (random.mean,) * 2))
    name, words = slug(f"dqn {runs.label} score"), "Score per epoch (the paper's figure 4)"
    return Plot(name, words, caption, "epoch", "mean return in testing", drawn)


def learning_rates(runs: RunGrid) -> list[Plot]:
    """What the learning rate does to the best score, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    drawn = rate_lines(runs, METRIC)
    name, words = slug(f"dqn {runs.label} rate"), "Best score by learning rate"
    return [
        Plot(name, words, line_caption(drawn), "learning rate", "best score", drawn, log_x=True)
    ]


def speeds(runs: RunGrid) -> Table:
    """Steps of the agent in a second, learning and testing together."""
    done = {kind: finished(records) for kind, (_, records) in runs.best.items()}
    found = {kind: stat(map(_speed, records)) for kind, records in done.items()}
    standard = found.get("standard", stat([]))
    rows = tuple(
        (
            style_of(kind).name,
            speed.text(digits=1),
            f"{speed.mean / standard.mean:.2f}" if speed.n and standard.n else "—",
            str(speed.runs),
        )
        for kind, speed in found.items()
    )
    notes = ["Mean ± standard deviation over n finished runs."]
    if differing := differing_fields(finished(runs.records), MACHINE):
        notes.append(f"Runs differ in {', '.join(differing)}: their times do not compare.")
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


# — a game —


def game_pictures(runs: RunGrid) -> list[Picture]:
    """A game as one agent of each parameterization plays it at the end."""
    made = []
    for kind, (_, records) in runs.best.items():
        for record in sorted(finished(records), key=lambda r: finite_or_nan(r.config.get("seed"))):
            frames = load_arrays(record, "game").get("frames", np.empty(0)).astype(np.uint8)
            if frames.ndim == 4 and frames.shape[0] and frames.shape[3] == 3:
                name, of = slug(f"dqn {runs.label} {kind} game"), style_of(kind).name
                seed = record.config.get("seed", "?")
                words = f"The agent of seed {seed} after its last epoch, from the start of a game."
                made.append(Picture(name, f"A game: {of}", words, frames, SECONDS))
                break
    return made


# — words —


def game(record: RunRecord) -> str:
    return str(record.config.get("game", "unknown"))


def title(name: str) -> str:
    """A game's name as people write it.

    >>> title("space-invaders")
    'Space Invaders'
    """
    return name.replace("-", " ").title()
