"""Report section of DQN: published scores, figure 4, recorded games."""

import io

import numpy as np
import pytest
from PIL import Image

from weightnorm.lab.reports import report
from weightnorm.lab.reports.document import Picture, Plot, Table
from weightnorm.lab.reports.dqn import section


@pytest.fixture
def agent(run):
    """`agent([score of each epoch], kind)`: a run that kept a game."""

    def write(scores, kind="weight-norm", keep=True, random=100.0, seconds=2.0, **changes):
        metrics = [
            {
                "epoch": e,
                "score": v,
                "train_score": v / 2,
                "mean_q": e / 2,
                "loss": 1 / e,
                "epsilon": 0.1,
                "seconds": seconds,
            }
            for e, v in enumerate(scores, 1)
        ]
        result = {"best_score": max(scores), "score": scores[-1], "random_score": random}
        usual = {"game": "space-invaders", "epochs": len(scores), "train_steps": 300}
        record = run(
            experiment="dqn", parameterization=kind, metrics=metrics, result=result,
            **(usual | {"test_steps": 100, "width": 1.0} | changes),
        )  # fmt: skip
        if keep:
            frames = np.random.default_rng(0).integers(0, 256, (5, 8, 6, 3), np.uint8)
            np.savez_compressed(record.folder / "game.npz", frames=frames)
        return record

    return write


def parts(records, game="Space Invaders"):
    """The preset's own part, and the game's."""
    (preset,) = section(records).content
    (of_game,) = (item for item in preset.content if item.title == game)
    return preset, of_game


def found(part, kind, title):
    (one,) = (x for x in part.content if isinstance(x, kind) and x.title.startswith(title))
    return one


def rows(part, title):
    table = found(part, Table, title)
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}


def test_scores_table_has_the_published_scores(agent):
    records = [
        agent([200, 500, 300], seed=1),
        agent([200, 300, 700], seed=2, random=140.0),
        agent([150, 250, 200], kind="standard"),
        agent([9.0, 3.0, 3.0], kind="standard", game="pong", seed=3),
    ]
    preset, _ = parts(records)
    table = rows(preset, "Scores")
    invaders = table["Space Invaders"]
    assert invaders["weight norm"] == "600 ± 141 (lr 0.003, n = 2)"
    assert invaders["standard"] == "250 (lr 0.003, n = 1)"
    assert invaders["random play"] == "120 ± 28"
    papers = ("paper, standard", "paper, weight norm", "Mnih et al.")
    assert [invaders[name] for name in papers] == ["1,779", "2,179", "1,975"]
    assert table["Pong"]["weight norm"] == table["Pong"]["Mnih et al."] == "—"
    assert "epochs 3" in found(preset, Table, "Scores").notes[1]


def test_training_scores_are_plotted(agent):
    _, game = parts([agent([100, 900, 100])])
    (line,) = found(game, Plot, "Score in training").lines
    assert line.y == (50, 450, 50)


def test_the_learning_rate_with_the_highest_best_score_is_drawn(agent):
    records = [
        agent([100, 900, 100], learning_rate=0.0003),
        agent([100, 300, 400], learning_rate=0.001),
    ]
    _, game = parts(records)
    lines = found(game, Plot, "Score per epoch").lines
    assert [line.name for line in lines] == ["weight norm, lr 0.0003, n = 1", "random play, n = 1"]
    assert lines[0].y == (100, 900, 100)
    assert (lines[1].x, lines[1].y) == ((1, 3), (100, 100))
    assert found(game, Plot, "Best score by learning rate").lines[0].y == (900, 400)


def test_values_and_losses_are_plotted(agent):
    _, game = parts([agent([1.0, 2.0, 3.0]), agent([2.0, 3.0, 4.0], kind="batch-norm")])
    values = found(game, Plot, "Estimated values")
    assert [line.style.name for line in values.lines] == ["batch norm", "weight norm"]
    assert values.lines[0].y == (0.5, 1.0, 1.5)
    assert found(game, Plot, "Loss").lines[0].y == (1, 1 / 2, 1 / 3)


def test_speed_is_in_steps_of_the_agent(agent):
    records = [agent([1.0, 2.0]), agent([1.0, 2.0], kind="standard", seconds=4 / 3)]
    _, game = parts(records)
    speed = rows(game, "Speed")
    assert speed["weight norm"]["steps per second"] == "200.0"
    assert speed["weight norm"]["relative to standard"] == "0.67"


def test_an_unfinished_run_is_dashed_and_not_counted(agent):
    _, game = parts([agent([1.0, 2.0]), agent([5.0], kind="standard", done=1, epochs=2)])
    lines = found(game, Plot, "Score per epoch").lines
    assert [line.unfinished for line in lines] == [True, False, False]
    assert rows(game, "Not finished")["standard"]["progress"] == "epoch 1 of 2"


def test_recorded_game_is_an_animation(agent, tmp_path):
    records = [agent([1.0, 2.0]), agent([1.0, 2.0], kind="standard", keep=False)]
    _, game = parts(records)
    picture = found(game, Picture, "A game")
    assert picture.title == "A game: weight norm"
    files = report(tmp_path / "runs", tmp_path / "out")
    assert files.problems == ()
    (moving,) = (path for path in files.figures if path.suffix == ".gif")
    with Image.open(io.BytesIO(moving.read_bytes())) as image:
        assert image.n_frames == 5
        assert image.size[0] / image.size[1] == 6 / 8
    assert "data:image/gif" in files.page.read_text()


def test_odd_records_raise_no_error(run, tmp_path):
    run(experiment="dqn", metrics=[], result={})
    run(
        experiment="dqn", seed=2, metrics=[{"epoch": 1, "score": None}], result={"best_score": None}
    )
    damaged = run(experiment="dqn", seed=3, metrics=[{"score": 1.0, "seconds": 0}])
    (damaged.folder / "game.npz").write_bytes(b"no archive")
    assert report(tmp_path / "runs", tmp_path / "out").problems == ()


def test_scores_over_parts_of_training(agent):
    _, game = parts([agent([10, 20, 30, 40, 70, 60, 50])])
    (row,) = rows(game, "Scores over training").values()
    assert row == {
        "parameterization": "weight norm",
        "best epoch": "70",
        "first half": "20",  # the first three of seven
        "second half": "55",
        "last five": "50",
        "last epoch": "50",
        "training, last five": "25",
        "n": "1",
        "lr": "0.003",
    }
