"""Tables, verdicts and figures of each experiment."""

import re

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from weightnorm.lab.claims.runner import CLAIMS
from weightnorm.lab.records import RunRecord
from weightnorm.lab.report import claims
from weightnorm.lab.report.bench import overview
from weightnorm.lab.report.claims import STATEMENTS, items, line_styles, summary
from weightnorm.lab.report.figures import curve_figure, rate_figure
from weightnorm.lab.report.page import experiment_section
from weightnorm.lab.report.style import STYLES, slug
from weightnorm.lab.report.tables import provenance, settings


def parts(records):
    """Title → part of the experiment's section."""
    return {part.title: part for part in experiment_section(records).parts}


def item(part, title):
    (found,) = (item for item in part.items if item.title == title)
    return found


def rows(part, title):
    """First cell → cells by column."""
    return item(part, title).body.set_index("method").to_dict("index")


def setting(records):
    (found,) = settings(records[0].experiment, records)
    return found


def lines(figure):
    """Name → line, of the named lines."""
    every = (line for axes in figure.axes for line in axes.lines)
    return {x.get_label(): x for x in every if not x.get_label().startswith("_")}


@pytest.fixture
def pair(run):
    """Standard and weight norm at 0.003 with three seeds, and standard at the paper's rate."""
    records = [run(parameterization="standard", learning_rate=0.0003, end=0.6)]
    for kind, end in (("standard", 0.4), ("weight-norm", 0.2)):
        records += [run(parameterization=kind, seed=s, end=end + 0.01 * s) for s in (1, 2, 3)]
    return records


def test_the_best_rate_is_tabulated_beside_the_papers_results(pair):
    part = parts(pair)["classify: cpu"]
    table = rows(part, "Errors")
    assert table["weight norm"] == {
        "training error, %": "22.00 ± 1.00",
        "test error, %": "11.00 ± 0.50",
        "n": "3",
        "paper, test, %": "8.46",
        "lr": "0.003",
        "epochs": "4",
    }
    assert table["standard"]["lr"] == "0.003"
    assert table["batch norm"]["paper, test, %"] == "8.05"  # not run here
    assert table["Maxout (published)"]["paper, test, %"] == "11.68"
    notes = item(part, "Errors").notes
    assert "paper's preset has width 1, epochs 200; these runs: width 0.25, epochs 4" in notes[-1]
    every = item(part, "Every learning rate").body
    assert every["lr"].tolist() == ["0.0003", "0.003", "0.003"]


def test_differences_are_paired_by_seed_and_judged(pair):
    part = parts(pair)["classify: cpu"]
    (verdict,) = part.verdicts
    assert verdict["difference"] == "−10.00 [−10.00, −10.00]"  # the same with every seed
    assert (verdict["mark"], verdict["n"]) == ("▲", "3")
    row = rows(part, "Difference to standard")["weight norm"]
    assert (row["last epoch"], row["n"]) == ("−10.00 [−10.00, −10.00]", "3")
    needed = rows(part, "Epochs to the same training error")
    assert needed["standard"]["epochs to 43.00 %"] == "4.0 ± 0.0"


def test_an_interval_without_zero_is_a_full_mark(run):
    records = [
        run(parameterization=kind, seed=seed, end=end + spread * seed)
        for kind, end, spread in (("standard", 0.2, 0.01), ("weight-norm", 0.4, 0.011))
        for seed in (1, 2, 3)
    ]
    (verdict,) = parts(records)["classify: cpu"].verdicts
    assert (verdict["mark"], verdict["ours"]) == ("▼", "21.10 ± 0.55")


def test_figures_name_rate_n_band_the_papers_rate_and_the_decay(pair):
    figure = curve_figure(setting(pair), "train_error")
    found = lines(figure)
    assert [*found] == [
        "standard, lr 0.003, n = 3",
        "standard, lr 0.0003 (the paper's), n = 1",
        "weight norm, lr 0.003, n = 3",
    ]
    assert found["weight norm, lr 0.003, n = 3"].get_ydata()[-1] == pytest.approx(22)
    assert found["weight norm, lr 0.003, n = 3"].get_color() == STYLES["weight-norm"].color
    (axes,) = figure.axes
    assert len(axes.collections) == 2  # a band for each mean over several runs
    low, high = axes.collections[1].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((21, 90), abs=1)
    assert "band: ± standard deviation" in figure.legends[0].get_title().get_text()
    assert [text.get_text().strip() for text in axes.texts] == ["learning rate falls"]
    assert axes.lines[-1].get_xdata()[0] == 2


def test_one_run_has_no_band_and_an_unfinished_one_is_dashed(run):
    records = [run(end=0.2), run(seed=2, end=0.9, done=3)]
    figure = curve_figure(setting(records), "train_error")
    assert not figure.axes[0].collections
    assert "band" not in figure.legends[0].get_title().get_text()
    finished, dashed = lines(figure).values()
    assert (finished.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert dashed.get_label() == "weight norm, seed 2: unfinished, epoch 3 of 4"
    part = parts(records)["classify: cpu"]
    assert rows(part, "Errors")["weight norm"]["n"] == "1"
    assert part.intro == "1 run finished, 1 run unfinished."


def test_a_diverged_run_has_no_number_and_no_point(run):
    diverged = {"train_error": None, "diverged": {"epoch": 3, "step": 5, "message": "nan"}}
    records = [run(end=0.2), run(seed=2, result=diverged), run(learning_rate=0.1, result=diverged)]
    one = setting(records)
    assert lines(rate_figure(one))["weight norm, n = 1 at each rate"].get_xdata() == [0.003]
    part = parts(records)["classify: cpu"]
    cells = rows(part, "Errors")["weight norm"]
    assert (cells["training error, %"], cells["n"]) == ("20.00 (n = 1 of 2)", "2")
    assert part.intro == "1 run finished, 2 runs diverged."


def test_settings_that_compare_are_shown_and_others_folded(run, pair):
    """Of two that compare, one is folded if the other has more seeds and no fewer epochs."""
    demo = run(preset="demo", width=0.1)
    records = [*pair, run(label="cpu+epochs=3", epochs=3), demo]
    for epochs in (2, 8):
        usual = {"label": f"cpu+epochs={epochs}", "epochs": epochs}
        records += [run(**usual, parameterization=kind) for kind in ("standard", "weight-norm")]
    found = parts(records)
    assert {title: part.folded for title, part in found.items()} == {
        "classify: cpu": False,
        "classify: cpu+epochs=8": False,
        "classify: cpu+epochs=2": True,
        "classify: cpu+epochs=3": True,
        "classify: demo": True,
    }
    (more,) = experiment_section(records).unfolded
    assert more.body["setting"].tolist() == ["cpu+epochs=3", "demo"]
    (alone,) = parts([demo]).values()
    assert not alone.folded  # there is nothing else to show


def test_provenance_shows_common_and_differing_values(run):
    table = provenance(
        setting([run(seed=3), run(seed=10, learning_rate=0.1, session={"commit": "fed+"})])
    )
    value = dict(table.body.to_numpy().tolist())
    assert value["width"] == "0.25"
    assert value["limit"] == "none"
    assert value["seed"] == "3 (n = 1), 10 (n = 1)"
    assert value["commit"] == "0123456789ab (n = 1), fed+ (n = 1)"
    assert table.notes[0] == "The runs differ in: commit."
    assert "uncommitted" in table.notes[1]


def elbo(run, bound, kind="standard", experiment="vae", **changes):
    """A run with a bound of −`bound` at the end."""
    rows = [
        {
            "epoch": e,
            "test_negative_elbo": bound + 10 * (2 - e),
            "train_negative_elbo": bound + 10 * (2 - e),
            "test_kl_1": 5.0,
            "seconds": 1.0,
        }
        for e in (1, 2)
    ]
    extra = {"importance_negative_log_likelihood": bound - 3}
    usual = {"importance_samples": 128, "importance_examples": 1000, "data": "mnist", "epochs": 2}
    return run(
        experiment=experiment,
        parameterization=kind,
        metrics=rows,
        result=rows[-1] | extra,
        **(usual | changes),
    )


def test_bounds_are_negated_and_data_sets_kept_apart(run):
    records = [elbo(run, 90.0), elbo(run, 88.0, "weight-norm")]
    cifar = elbo(run, 9.0, label="cpu/cifar10", data="cifar10")
    found = parts([*records, cifar])
    assert [*found] == ["vae: MNIST, cpu", "vae: CIFAR-10, cpu"]
    part = found["vae: MNIST, cpu"]
    table = rows(part, "Bounds")
    assert table["weight norm"]["bound, nats"] == "−88.00"
    assert table["weight norm"]["log p(x), nats"] == "−85.00"
    assert "128 importance samples on the first 1000 test" in item(part, "Bounds").notes[1]
    assert rows(part, "KL of each stochastic layer")["standard"]["layer 1"] == "5.00"
    (verdict,) = part.verdicts
    assert (verdict["difference"], verdict["mark"], verdict["n"]) == ("+2.00", "△", "1")
    line = lines(curve_figure(setting(records), "test_negative_elbo"))
    assert line["weight norm, lr 0.003, n = 1"].get_ydata() == pytest.approx([-98, -88])


def test_each_initial_g_of_draw_is_a_method(run):
    usual = {"experiment": "draw", "data": "binarized-mnist"}
    records = [
        elbo(run, 96.0, **usual),
        elbo(run, 97.0, "weight-norm", **usual),  # recorded before there was an initial_g
        elbo(run, 98.0, "weight-norm", seed=2, initial_g="norm", **usual),
        elbo(run, 90.0, "weight-norm", label="cpu+initial-g=one", initial_g="one", **usual),
    ]
    (part,) = parts(records).values()
    assert part.title == "draw: cpu"
    table = rows(part, "Bounds")
    assert table["weight norm, g = ‖v‖"]["n"] == "2"
    assert table["weight norm, g = 1"]["test bound"] == "−90.00"
    assert [row["difference"] for row in part.verdicts] == ["−1.00", "+6.00"]


def agent(run, scores, kind="weight-norm", random=100.0, **changes):
    metrics = [
        {"epoch": e, "score": v, "train_score": v / 2, "seconds": 1.0}
        for e, v in enumerate(scores, 1)
    ]
    result = {"best_score": max(scores), "score": scores[-1], "random_score": random}
    return run(
        experiment="dqn",
        parameterization=kind,
        metrics=metrics,
        result=result,
        **({"game": "space-invaders", "epochs": len(scores)} | changes),
    )


def test_dqn_is_judged_by_training_and_shown_beside_random_play(run):
    records = [
        agent(run, [10, 20, 30, 40, 70, 60, 50]),
        agent(run, [10, 20, 30, 40, 50, 45, 44], learning_rate=0.01),
        agent(run, [10, 20, 30, 40, 70, 60, 90], "standard", random=140.0, seed=2),
        agent(run, [10, 20, 30, 40, 70, 60, 90], "standard", game="pong"),
    ]
    found = parts(records)
    assert {*found} == {"dqn: Space Invaders, cpu", "dqn: pong, cpu"}
    part = found["dqn: Space Invaders, cpu"]
    table = rows(part, "Scores over training")
    assert table["weight norm"] == {
        "training, first quarter": "5",
        "training, last quarter": "25",
        "best epoch": "70",
        "testing, last five": "50",
        "n": "1",
        "paper, best": "2,179",
        "lr": "0.003",  # the highest is the best
        "epochs": "7",
    }
    assert table["random play"]["best epoch"] == "120 ± 28"
    assert table["Mnih et al. (published)"]["paper, best"] == "1,975"
    assert "random play, n = 2" in lines(curve_figure(settings("dqn", records)[0], "score"))
    again = [*records[:1], agent(run, [9.0] * 7, "standard", learning_rate=0.02)]
    (row,) = parts(again)["dqn: Space Invaders, cpu"].verdicts
    assert (row["ours"], row["standard"], row["mark"]) == ("25", "4", "△")


def words(run, value, how, optimizer="adamw", **changes):
    rows = [
        {"epoch": e, "test_bits_per_byte": value, "train_bits_per_byte": value, "seconds": 6.0 * e}
        for e in (1, 2)
    ]
    result = rows[-1] | {"trigram_bits_per_byte": 2.6}
    return run(
        experiment="language",
        parameterization=how,
        metrics=rows,
        result=result,
        label=changes.pop("label", f"{optimizer}/cpu"),
        **({"optimizer": optimizer, "epochs": 2, "steps": 100, "retract": False} | changes),
    )


def test_language_methods_are_compared_with_their_own_optimizer(run):
    records = [words(run, 1.5 + 0.01 * s, "standard", seed=s, weight_decay=0.1) for s in (1, 2)]
    records += [words(run, 1.4 + 0.02 * s, "weight-norm", seed=s) for s in (1, 2, 3)]
    records += [
        words(run, 1.3, "weight-norm", label="restored/cpu+retract=True", retract=True),
        words(run, 1.3, "weight-norm", "muon"),
    ]
    (part,) = parts(records).values()
    assert part.title == "language: cpu"
    table = rows(part, "Bits per byte")
    assert table["AdamW, weight norm"]["seconds per epoch"] == "6.0"
    assert table["trigram model"]["held-out"] == "2.600"
    row = rows(part, "Difference")["AdamW, weight norm"]
    assert (row["compared with"], row["n"]) == ("AdamW", "2")
    assert row["last epoch"].startswith("−0.085 [−")
    figure = curve_figure(setting(records), "test_bits_per_byte")
    steps, minutes = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["step", "minutes of training"]
    assert steps.lines[0].get_xdata() == pytest.approx([100, 200])
    assert minutes.lines[0].get_xdata() == pytest.approx([0.1, 0.2])
    assert not any("restored" in name for name in lines(figure))


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": [], "result": {}},
        {"done": 0},
        {"metrics": [{"epoch": "one", "train_error": "low"}], "data": None},
        {"result": {"train_error": "low"}, "learning_rate": "high", "seed": "first"},
    ],
)
def test_odd_records_raise_no_error(run, changes):
    for experiment in ("classify", "vae", "draw", "dqn", "language"):
        for part in experiment_section([run(experiment=experiment, **changes)]).parts:
            for each in part.items:
                if callable(each.body):
                    each.body()


def claim_row(id, kind="finding", **changes):
    names = ("standard", "weight-norm", "weight-norm-log")
    curves = [{"name": name, "x": [0.01, 0.1], "y": [1, 2], "low": [0, 1]} for name in names]
    curves = [curve | {"high": curve["y"]} for curve in curves]
    figure = {"title": "", "x": "rate", "y": "loss", "log_x": True, "series": curves}
    panels = [{**figure, "title": f"width {n}", "panels": "by width"} for n in (32, 128, 512)]
    row = {
        "section": "2",
        "statement": "It holds",
        "paper": "much",
        "rule": "above 0",
        "measured_at": "",
    }
    row |= {"value": "weight-norm -1 [-2, 0], batch-norm 3 [2, 4]", "verdict": "reproduced"}
    number = int(id.partition(".")[0])
    return {**row, "id": id, "number": number, "kind": kind, "n": 3, "figures": panels, **changes}


def test_claims_are_two_lists_and_panels_one_figure(tmp_path):
    rows = [claim_row("1", "identity", verdict="holds", figures=[]), claim_row("6.3")]
    record = RunRecord(tmp_path, "claims", "full", {}, metrics=rows)
    assert summary(record) == ["1 identities: holds: 1 (1).", "1 findings: reproduced: 1 (6.3)."]
    found = {item.title: item.body for item in items(record)}
    assert [*found] == ["Verdicts", "Findings", "Rules", "Identities", "Claim 6.3: by width"]
    assert found["Findings"].to_numpy().tolist() == [
        ["6.3. It holds", "much", "weight norm −1 [−2, 0]\nbatch norm 3 [2, 4]", "3", "reproduced"]
    ]
    drawn = found["Claim 6.3: by width"]()
    assert [axes.get_title() for axes in drawn.axes] == ["width 32", "width 128", "width 512"]
    assert [*lines(drawn)] == ["standard", "weight norm", "weight-norm-log"]
    assert "n = 3; line: mean over seeds" in drawn.legends[0].get_title().get_text()


def test_every_experiment_of_the_paper_has_its_statements():
    every = {id for claim in CLAIMS.values() for id in (str(claim.number), *claim.ids())}
    assert {x for chosen in STATEMENTS.values() for x in chosen} <= every
    rows = [claim_row("20.1"), claim_row("20.2"), claim_row("20.4"), claim_row("24")]
    assert [row["id"] for row in claims.about_experiment("vae", rows)] == ["20.1", "20.2"]
    assert [row["id"] for row in claims.about_experiment("dqn", rows)] == ["20.4", "24"]
    value = "vae cpu mnist, smaller: weight-norm -1"
    table, notes = claims.verdicts([claim_row("20.1", value=value)])
    assert table.iloc[0].tolist() == ["20.1. It holds: much", "weight norm −1", "3", "reproduced"]
    assert notes == ["Runs: vae cpu mnist, smaller."]


def test_lines_of_claims_have_the_colors_of_parameterizations():
    small, large = line_styles(["batch-norm, batch 64", "batch-norm, batch 256"])
    assert (small.name, small.color) == ("batch norm, batch 64", STYLES["batch-norm"].color)
    assert large.color != small.color
    assert len(line_styles([*STYLES, "one more"])) == len(STYLES) + 1


def test_the_chart_of_costs_leaves_out_noise_and_unbounded_intervals():
    def result(value, noise=False, high=1.2):
        return {"value": value, "low": 0.9, "high": high, "noise": noise}

    names = {"ours": "a", "torch_parametrization": "b", "torch_hook": "c", "batch_norm": ""}
    results = {"a": result(1.1), "b": result(0.9, noise=True), "c": result(2.0, high=None)}
    line = {"work": "a network", **names}
    found = {"benchmarks": [{"cases": [{"results": results, "summary": [line]}]}]}
    drawn = overview(found)
    assert [*lines(drawn)] == ["ours"]
    assert [tick.get_text() for tick in drawn.axes[0].get_yticklabels()] == ["a network"]


@pytest.mark.parametrize("text", ["../../etc/passwd", "", "‖v‖", "a" * 400, ".."])
def test_a_slug_is_a_safe_file_name(text):
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,149}", slug(text))


def test_no_label_is_cut(run):
    metrics = [{"epoch": e, "mean_q": 0.1 * e, "train_score": e} for e in (1, 2)]
    record = run(experiment="dqn", metrics=metrics, result={"best_score": 2.0}, game="pong")
    for metric in ("mean_q", "train_score"):
        figure = curve_figure(setting([record]), metric)
        FigureCanvasAgg(figure).draw()
        width, height = figure.get_size_inches()
        box = figure.get_tightbbox()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= width
        assert box.y1 <= height
