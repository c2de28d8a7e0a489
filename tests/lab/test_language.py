"""The language model: its optimizers, its corpus, that it learns, resumes and refuses."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from commands import kill_at_second_checkpoint, outcome, run_folder, same, spread, weightnorm
from weightnorm import Parameterization, WeightNormOptimizer
from weightnorm.lab import language
from weightnorm.lab.data import torch_source
from weightnorm.lab.data.torch_source import Corpus, trigram_bits_per_byte
from weightnorm.lab.environment import Ranks
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.language import PRESETS, RATES, Config, Transformer
from weightnorm.lab.records import load_record
from weightnorm.lab.reports.report import sections_of
from weightnorm.lab.sweeps.grid import Grid

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LINES = b"def f(x):\n    return x + 1\n\nclass A:\n    pass\n\nfor i in range(10):\n    print(i)\n"


@pytest.fixture(scope="module")
def corpus():
    torch.manual_seed(0)
    lines = LINES.splitlines(keepends=True)
    text = b"".join(lines[i] for i in torch.randint(len(lines), (4000,)).tolist())
    train, test = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (text, text[:9000]))
    return Corpus(train, test, "digest", "2.13.0")


TINY = replace(
    PRESETS["demo"],
    epochs=2,
    steps=3,
    batch_size=4,
    context=16,
    width=16,
    depth=1,
    heads=2,
    eval_texts=8,
    device="cpu",
)
METHODS = {f"{optimizer}-{how}": (optimizer, how) for optimizer, how in RATES}


def config(tmp_path, method="adamw-standard", **changes):
    optimizer, how = METHODS[method]
    chosen = {"optimizer": optimizer, "parameterization": how, **changes}
    return replace(TINY, runs=tmp_path, **chosen)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_records(method, tmp_path, corpus):
    record = language.run(config(tmp_path, method), corpus=corpus)
    first, last = record.metrics
    assert last["test_bits_per_byte"] < first["test_bits_per_byte"]
    assert last["step_angle"] > 0
    assert ("v_norm" in last) == ("weight-norm" in method)
    section = sections_of([record])["language"]
    assert any("trigram model" in text for text in section.content[0].findings)


def test_bfloat16_is_near_float32_and_not_equal(tmp_path, corpus):
    made = config(tmp_path)
    one, half = (
        language.run(replace(made, precision=precision), corpus=corpus).column("test_bits_per_byte")
        for precision in ("float32", "bfloat16")
    )
    assert half == pytest.approx(one, rel=0.01)
    assert half != one


def test_the_report_pairs_seeds_of_an_optimizer_with_and_without_weight_norm(tmp_path, corpus):
    records = [
        language.run(config(tmp_path, method, seed=seed), corpus=corpus)
        for method, seeds in {"adamw-standard": (1, 2), "adamw-weight-norm": (1, 2, 3)}.items()
        for seed in seeds
    ]
    without_plain = [
        language.run(config(tmp_path, f"{optimizer}-weight-norm", initial_g="one"), corpus=corpus)
        for optimizer in ("adamw", "muon")
    ]
    part, others = sections_of([*records, *without_plain])["language"].content
    assert others.title == "language: other settings"
    rows = others.content[0].rows
    assert all("initial-g=one" in name for name, *_ in rows)
    assert [row[1:3] for row in rows] == [
        ("AdamW, weight norm", "0.005"),
        ("Muon, weight norm (Muown)", "0.05"),
    ]
    (table,) = (item for item in part.content if getattr(item, "title", "") == "Difference")
    (row,) = table.rows
    assert row[:2] == ("AdamW, weight norm", "AdamW")
    assert row[-1] == "2"
    a, b = ([r.result["test_bits_per_byte"] for r in records[i : i + 2]] for i in (2, 0))
    difference = (a[0] - b[0] + a[1] - b[1]) / 2
    assert row[-2].startswith(f"{difference:+.3f} [".replace("-", "−"))
    panels = part.content[0]
    assert [plot.x for plot in panels.plots] == ["step", "minutes of training"]
    assert panels.plots[0].lines[0].x == (3.0, 6.0)


@pytest.mark.parametrize("method", ["adamw-weight-norm", "muon-weight-norm"])
def test_initial_g_of_one_keeps_the_directions(tmp_path, method):
    models = []
    for initial_g in ("norm", "one"):
        torch.manual_seed(0)
        models.append(Transformer(16, 1, 2, 16))
        made = config(tmp_path, method, initial_g=initial_g)
        optimizer = language.build_optimizers(models[-1], made)[0]
    assert all(torch.allclose(g, torch.ones_like(g)) for _, g in optimizer.parts().values())
    kept, unit = (dict(model.named_parameters()) for model in models)
    for name, w in kept.items():
        expected = w / w.norm(dim=1, keepdim=True) if name in optimizer.parts() else w
        torch.testing.assert_close(unit[name], expected)


def test_retraction_keeps_the_norm_of_v(tmp_path, corpus):
    growth = {}
    for retract in (False, True):
        made = config(tmp_path, "adamw-weight-norm", retract=retract, weight_decay=0.0)
        first, last = (row["v_norm"] for row in language.run(made, corpus=corpus).metrics)
        growth[retract] = last / first
    assert growth[True] == pytest.approx(1, abs=1e-6)
    assert growth[False] > 1


@pytest.mark.parametrize("method", METHODS)
def test_optimizers_cover_every_parameter_once(method, tmp_path):
    model = Transformer(16, 1, 2, 16)
    optimizers = language.build_optimizers(model, config(tmp_path, method))
    shown = [p for group in language.groups_of(optimizers) for p in group["params"]]
    assert {id(p) for p in shown} == {id(p) for p in model.parameters()}
    assert len(shown) == len(list(model.parameters()))
    normalized = isinstance(optimizers[0], WeightNormOptimizer)
    assert normalized == ("weight-norm" in method)
    if normalized:
        assert set(optimizers[0].parts()) == {
            f"blocks.0.{name}.weight"
            for name in ("attention.query", "attention.key", "attention.value", "attention.out",
                         "up", "down")
        }  # fmt: skip


@pytest.mark.parametrize("method", ["adamw-weight-norm", "muon-weight-norm", "muon-standard"])
def test_resume_is_bit_exact(method, tmp_path, corpus, monkeypatch):
    whole = language.run(config(tmp_path / "whole", method), corpus=corpus)
    step, calls = language.sample, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(language, "sample", interrupted)
    made = config(tmp_path / "parts", method)
    with pytest.raises(KeyboardInterrupt):
        language.run(made, corpus=corpus)
    monkeypatch.setattr(language, "sample", step)
    resumed = language.run(made, corpus=corpus)
    for a, b in zip(whole.metrics, resumed.metrics, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_a_run_that_is_killed_in_an_evaluation_resumes(tmp_path, corpus, monkeypatch):
    whole = language.run(config(tmp_path / "whole"), corpus=corpus)
    made = replace(config(tmp_path / "parts"), checkpoint_seconds=0.0)
    monkeypatch.setattr(language, "evaluate", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        language.run(made, corpus=corpus)
    monkeypatch.undo()
    resumed = language.run(made, corpus=corpus)
    for a, b in zip(whole.metrics, resumed.metrics, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_it_learns_and_beats_a_trigram_model(tmp_path, corpus):
    made = config(tmp_path, epochs=4, steps=40, batch_size=16, context=32, width=32)
    record = language.run(replace(made, learning_rate=0.01, other_learning_rate=0.01), None, corpus)
    assert record.result["train_bits_per_byte"] < 1.2
    assert record.result["trigram_bits_per_byte"] == trigram_bits_per_byte(corpus)
    assert record.result["test_bits_per_byte"] < record.result["trigram_bits_per_byte"]


def test_the_network_of_the_cpu_preset_learns_from_the_source_of_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_source, "trigram_bits_per_byte", lambda corpus: 2.6)  # takes seconds
    size = {"epochs": 2, "steps": 30, "batch_size": 4, "context": 64, "eval_texts": 32}
    made = replace(PRESETS["cpu"], runs=tmp_path, optimizer="muon", device="cpu", **size)
    result = language.run(made).result
    assert result["train_bits_per_byte"] < 4  # the frequencies of single bytes: 4.6
    assert result["test_bits_per_byte"] < 4


@pytest.mark.parametrize("method", METHODS)
def test_recorded_runs_beat_the_trigram_model_with_three_seeds(method):
    folder = RESULTS / "language" / "runs" / "language" / "cpu+precision=bfloat16"
    records = [load_record(path) for path in folder.joinpath(*METHODS[method]).glob("*/seed-*")]
    assert {record.config["seed"] for record in records} >= {1, 2, 3}
    for record in records:
        assert record.result["test_bits_per_byte"] < record.result["trigram_bits_per_byte"]
        assert len(record.metrics) == PRESETS["cpu"].epochs


def test_another_corpus_is_refused(tmp_path, corpus):
    made = config(tmp_path)
    language.run(made, corpus=corpus)
    (tmp_path / "language").rename(tmp_path / "moved")
    (folder,) = (tmp_path / "moved").rglob("seed-1")
    (folder / "result.json").unlink()
    (tmp_path / "moved").rename(tmp_path / "language")
    other = replace(corpus, digest="another", version="2.14.0")
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0; this is 2\.14\.0, which is another"):
        language.run(made, corpus=other)


def test_a_short_corpus_is_refused(tmp_path, corpus):
    short = replace(corpus, test=corpus.test[:17])
    with pytest.raises(ConfigError, match="context is 16; expected at most 15: the corpus has"):
        language.run(config(tmp_path), corpus=short)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameterization": "batch-norm"}, "parameterization is batch-norm; expected standard"),
        ({"optimizer": "hyperball", "parameterization": "standard"}, "hyperball fixes the norm"),
        ({"parameterization": "standard", "retract": True}, "retract is True; expected False"),
        ({"heads": 7}, "heads is 7; expected a divisor of 192"),
        ({"width": 18, "heads": 6}, "with heads of an even size"),
    ],
)
def test_impossible_configs(changes, message):
    if "parameterization" in changes:
        changes = {**changes, "parameterization": Parameterization(changes["parameterization"])}
    with pytest.raises(ConfigError, match=message):
        Config(**changes)


def test_a_sweep_leaves_out_hyperball_without_weight_norm(tmp_path):
    axes = {"optimizer": ("muon", "hyperball")}
    plan = Grid(
        "language", replace(TINY, runs=tmp_path), language.Config.COMPARED, axes=axes
    ).plan()
    made = [(job.config.optimizer, str(job.config.parameterization)) for job in plan]
    assert made == [("muon", "standard"), ("muon", "weight-norm"), ("hyperball", "weight-norm")]
    assert [job.config.learning_rate for job in plan] == [0.02, 0.05, 0.01]
    impossible = replace(
        Grid("language", TINY, (Parameterization.STANDARD,)), axes={"optimizer": ("hyperball",)}
    )
    with pytest.raises(ConfigError, match="no run"):
        impossible.plan()


def tiny(runs, *words):
    """The command of a small run of Muon with weight norm on the real corpus."""
    size = "--epochs 2 --steps 8 --batch-size 3 --context 16 --width 16 --depth 1 --heads 2"
    method = "--preset demo --optimizer muon --parameterization weight-norm --eval-texts 7"
    rate = "--learning-rate 0.02"  # Muon rounds to bfloat16: at higher rates ranks differ by more
    made = (*method.split(), *size.split(), *rate.split())
    return ("run", "language", *made, "--runs", runs, *words)


@pytest.mark.xdist_group("language")
def test_killed_and_resumed_through_the_command_line_and_on_two_ranks(tmp_path):
    whole, parts, ranks = (tmp_path / name for name in ("whole", "parts", "ranks"))
    assert weightnorm(*tiny(whole))[0] == 0

    command = tiny(parts)
    kill_at_second_checkpoint(parts, *command)
    assert weightnorm(*command)[0] == 0
    assert len(load_record(run_folder(parts)).sessions) == 2
    assert same(outcome(parts), outcome(whole))

    spread(2, *tiny(ranks))
    one, two = (load_record(run_folder(runs)) for runs in (whole, ranks))
    assert two.environment["ranks"] == 2
    for name in one.metrics[0]:
        if name != "seconds":
            assert two.column(name) == pytest.approx(one.column(name), rel=1e-3)


def test_settings_without_effect_are_no_settings():
    plain = replace(PRESETS["demo"], parameterization=Parameterization.STANDARD)
    assert replace(plain, length_learning_rate=0.5, initial_g="one") == plain
    fixed = replace(PRESETS["demo"], optimizer="hyperball")
    others = {"length_learning_rate": 0.5, "weight_decay": 0.3, "retract": True, "initial_g": "one"}
    assert replace(fixed, **others) == fixed


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_the_optimizers(method, tmp_path):
    made, model = config(tmp_path, method), Transformer(16, 1, 2, 16)
    matrices = {m.weight for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)}
    found = {}
    for group in language.groups_of(language.build_optimizers(model, made)):
        role = "matrices" if matrices & {*group["params"]} else "others" if group["params"] else "g"
        decay = None if method == "hyperball-weight-norm" else group["weight_decay"]
        found[role] = group["lr"], decay, group.get("betas")
    momenta = None if "muon" in method else (0.9, 0.95)
    decay = {"hyperball-weight-norm": None}.get(method, 0.1 if "standard" in method else 0.0)
    expected = {"matrices": (made.rate, decay, momenta)}
    expected["others"] = 0.003, None if decay is None else 0.0, (0.9, 0.999)
    if method in ("adamw-weight-norm", "muon-weight-norm"):
        expected["g"] = {"adamw": 0.005, "muon": 0.1}[made.optimizer], 0.0, (0.9, 0.95)
    assert found == expected


@pytest.mark.parametrize("method", [name for name in METHODS if "hyperball" not in name])
def test_weight_decay_is_of_the_matrices_alone_and_decoupled(method, tmp_path):
    made = config(tmp_path, method, weight_decay=0.3)
    model = Transformer(16, 1, 2, 16)
    matrices = {m.weight for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)}
    optimizers = language.build_optimizers(model, made)
    before = {p: p.detach().clone() for p in model.parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    for p, value in before.items():
        factor = 1 - 0.3 * made.rate if p in matrices else 1
        torch.testing.assert_close(p.detach(), factor * value)


def test_held_out_texts_reach_from_the_first_to_the_last_byte(tmp_path, corpus):
    texts = language.held_out(corpus, config(tmp_path))
    assert texts.shape == (8, 17)
    assert torch.equal(texts[0], corpus.test[:17])
    assert torch.equal(texts[-1], corpus.test[-17:])


def test_equally_likely_bytes_take_eight_bits(tmp_path, corpus):
    made = config(tmp_path)
    run = mock.Mock(ranks=Ranks(), device=torch.device("cpu"))

    def network(texts):
        return torch.zeros(*texts.shape, 256)

    texts = language.held_out(corpus, replace(made, eval_texts=6))  # batches of 4 and 2
    assert language.evaluate(network, texts, made, run) == pytest.approx(8)
