"""The language model: its network, its optimizers, that it learns, its corpus."""

import math
from dataclasses import replace

import pytest
import torch

from weightnorm import Parameterization, WeightNormOptimizer
from weightnorm.lab import language
from weightnorm.lab.errors import ConfigError, DataError
from weightnorm.lab.language import (
    PRESETS,
    Config,
    Corpus,
    Transformer,
    is_held_out,
    load_torch_source,
    rotate,
    rotations,
    trigram_bits_per_byte,
)
from weightnorm.lab.run import Run
from weightnorm.lab.sweep import Grid

LINES = b"def f(x):\n    return x + 1\n\nclass A:\n    pass\n\nfor i in range(10):\n    print(i)\n"
TINY = replace(
    PRESETS["demo"], epochs=2, steps=3, batch_size=4, context=16, width=16, depth=1, heads=2,
    eval_texts=8, device="cpu",
)  # fmt: skip
METHODS = {
    f"{optimizer}-{how}": (optimizer, how)
    for optimizer in ("adamw", "muon", "muown", "hyperball")
    for how in Config.COMPARED
    if not language.leaves_out({"optimizer": optimizer, "parameterization": how})
}


@pytest.fixture(scope="module")
def corpus():
    torch.manual_seed(0)
    lines = LINES.splitlines(keepends=True)
    text = b"".join(lines[i] for i in torch.randint(len(lines), (4000,)).tolist())
    train, test = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (text, text[:9000]))
    return Corpus(train, test, "digest", "2.13.0")


def config(tmp_path, method="adamw-standard", **changes):
    optimizer, how = METHODS[method]
    chosen = {"optimizer": optimizer, "parameterization": how, **changes}
    return replace(TINY, out=tmp_path, **chosen)


# — the network —


def small(**options):
    torch.manual_seed(0)
    return Transformer(
        replace(PRESETS["cpu"], **{"width": 12, "depth": 2, "heads": 2, "context": 16, **options})
    )


def text_of(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


def test_size_and_scale_of_the_network():
    assert sum(p.numel() for p in Transformer(PRESETS["cpu"]).parameters()) == pytest.approx(
        1.87e6, rel=0.01
    )
    model, streams = small(width=64, depth=12, heads=4, context=64), []
    model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].std()))
    logits = model(text_of(4, 64))
    assert 0.8 < logits.std().item() < 1.2
    assert 0.8 < streams[0] < 1.7  # of the residual stream, which is bounded in depth


def test_predictions_depend_on_earlier_bytes_alone():
    model, text = small(), text_of(3, 9)
    changed = text.clone()
    changed[:, 5] += 1
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert ((before[:, 5:] - after[:, 5:]).abs().amax((0, 2)) > 1e-4).all()


def test_products_depend_on_the_difference_of_positions():
    angles = rotations(20, 6)
    q, k = (torch.randn(6).expand(20, 6) for _ in range(2))
    products = rotate(q, angles) @ rotate(k, angles).T
    torch.testing.assert_close(products[3, 7], products[10, 14], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(q, angles).norm(dim=1), q.norm(dim=1))


# — the optimizers —


@pytest.mark.parametrize("method", METHODS)
def test_optimizers_have_every_parameter_once_with_its_settings(method, tmp_path):
    made, model = config(tmp_path, method), small(width=16, depth=1)
    optimizers = language.build_optimizers(model, made)
    matrices = {m.weight for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)}
    shown = [p for group in language.groups_of(optimizers) for p in group["params"]]
    assert {*shown} == {*model.parameters()}
    assert len(shown) == len({*shown})
    if "weight-norm" in method:
        normalized = dict(model.named_parameters())
        assert {normalized[name] for name in optimizers[0].parts()} == matrices
    assert isinstance(optimizers[0], WeightNormOptimizer) == ("weight-norm" in method)

    found = {}
    for group in language.groups_of(optimizers):
        role = "matrices" if matrices & {*group["params"]} else "others" if group["params"] else "g"
        decay = None if method == "hyperball-weight-norm" else group["weight_decay"]
        found[role] = group["lr"], decay, group.get("betas")
    momenta = None if "mu" in method else (0.9, 0.95)
    decay = {"hyperball-weight-norm": None}.get(method, 0.1 if "standard" in method else 0.0)
    expected = {"matrices": (made.rate, decay, momenta)}
    expected["others"] = 0.003, None if decay is None else 0.0, (0.9, 0.999)
    lengths = {"adamw": 0.005, "muon": 0.1, "muown": made.rate}
    if "weight-norm" in method and made.optimizer in lengths:
        expected["g"] = lengths[made.optimizer], 0.0, (0.9, 0.95)
    assert found == expected


def orthogonalized(x, steps=5):
    """Newton–Schulz iteration of Muon, in bfloat16, on the flat side of a matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (x.T if x.shape[0] > x.shape[1] else x).bfloat16()
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_muown_is_the_published_one(tmp_path):
    """Two steps by the formulas of arXiv 2605.10797, with Nesterov momentum and Adam's bias
    correction, in matrices that are square, wide and tall."""
    made = config(tmp_path, "muown-weight-norm", learning_rate=0.01)
    model = small(width=16, depth=1)
    (optimizer,) = language.build_optimizers(model, made)
    matrices = {n: m.weight for n, m in model.named_modules() if n.startswith("blocks") and
                isinstance(m, torch.nn.Linear)}  # fmt: skip
    state = {}
    for name, weight in matrices.items():
        w = weight.detach().clone()
        zeros = torch.zeros_like(w), torch.zeros(len(w), 1), torch.zeros(len(w), 1)
        state[name] = [w.clone(), w.norm(dim=1, keepdim=True), *zeros]
    for step in (1, 2):
        for p in model.parameters():  # far from singular: the iteration is in bfloat16
            p.grad = torch.nn.init.orthogonal_(torch.empty(p.shape)) if p.ndim == 2 else p.detach()
        for name, weight in matrices.items():
            v, g, momentum, first, second = state[name]
            norm, grad = v.norm(dim=1, keepdim=True), weight.grad
            grad_g = (grad * v).sum(1, keepdim=True) / norm
            grad_v = g / norm * grad - g * grad_g / norm**2 * v
            momentum = 0.95 * momentum + grad_v
            moved = orthogonalized(grad_v + 0.95 * momentum)
            moved = moved if moved.shape == v.shape else moved.T
            first, second = 0.9 * first + 0.1 * grad_g, 0.95 * second + 0.05 * grad_g**2
            root = (second / (1 - 0.95**step)).sqrt() + 1e-8
            v = v - 0.01 * 0.2 * max(v.shape) ** 0.5 * moved.float()
            g = g - 0.01 * first / (1 - 0.9**step) / root
            state[name] = [v, g, momentum, first, second]
        before = {name: weight.detach().clone() for name, weight in matrices.items()}
        optimizer.step()
        for name, weight in matrices.items():
            v, g, *_ = state[name]
            moved = g * v / v.norm(dim=1, keepdim=True) - before[name]
            found = weight.detach() - before[name]
            assert (found - moved).norm() < 0.06 * moved.norm()


@pytest.mark.parametrize("method", [name for name in METHODS if "hyperball" not in name])
def test_weight_decay_is_of_the_matrices_alone_and_decoupled(method, tmp_path):
    made, model = config(tmp_path, method, weight_decay=0.3), small(width=16, depth=1)
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


def test_initial_g_of_one_keeps_the_directions(tmp_path):
    models = []
    for initial_g in ("norm", "one"):
        models.append(small(width=16, depth=1))
        made = config(tmp_path, "adamw-weight-norm", initial_g=initial_g)
        optimizer = language.build_optimizers(models[-1], made)[0]
    assert all(torch.allclose(g, torch.ones_like(g)) for _, g in optimizer.parts().values())
    kept, unit = (dict(model.named_parameters()) for model in models)
    for name, w in kept.items():
        expected = w / w.norm(dim=1, keepdim=True) if name in optimizer.parts() else w
        torch.testing.assert_close(unit[name], expected)


# — runs —


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_records(method, tmp_path, corpus):
    record = language.run(config(tmp_path, method), corpus=corpus)
    first, last = record.metrics
    assert last["test_bits_per_byte"] < first["test_bits_per_byte"]
    assert last["step_angle"] > 0
    assert ("v_norm" in last) == ("weight-norm" in method)


def test_retraction_keeps_the_norm_of_v(tmp_path, corpus):
    growth = {}
    for retract in (False, True):
        made = config(tmp_path, "adamw-weight-norm", retract=retract, weight_decay=0.0)
        first, last = (row["v_norm"] for row in language.run(made, corpus=corpus).metrics)
        growth[retract] = last / first
    assert growth[True] == pytest.approx(1, abs=1e-6)
    assert growth[False] > 1


def test_it_learns_and_beats_a_trigram_model(tmp_path, corpus):
    size = {"epochs": 2, "steps": 80, "batch_size": 16, "context": 32, "width": 32}
    made = config(tmp_path, **size, learning_rate=0.01, other_learning_rate=0.01)
    record = language.run(made, corpus=corpus)
    assert record.result["train_bits_per_byte"] < 1.2
    assert record.result["trigram_bits_per_byte"] == trigram_bits_per_byte(corpus)
    assert record.result["test_bits_per_byte"] < record.result["trigram_bits_per_byte"]


def test_held_out_texts_reach_from_the_first_to_the_last_byte(tmp_path, corpus):
    texts = language.held_out(corpus, config(tmp_path))
    assert texts.shape == (8, 17)
    assert torch.equal(texts[0], corpus.test[:17])
    assert torch.equal(texts[-1], corpus.test[-17:])


def test_equally_likely_bytes_take_eight_bits(tmp_path, corpus):
    made = config(tmp_path)
    run = Run("language", made, PRESETS)
    texts = language.held_out(corpus, replace(made, eval_texts=6))  # batches of 4 and 2
    network = lambda texts: torch.zeros(*texts.shape, 256)  # noqa: E731
    assert language.evaluate(network, texts, made, run) == pytest.approx(8)


# — settings —


def test_another_corpus_is_refused(tmp_path, corpus):
    record = language.run(config(tmp_path), corpus=corpus)
    (record.folder / "result.json").unlink()
    for changes in ({"digest": "another"}, {"digest": "another", "version": "2.14.0"}):
        other = replace(corpus, **changes)
        message = rf"torch 2\.13\.0 \(SHA-256 digest\); this is torch {other.version}.*another"
        with pytest.raises(ConfigError, match=message):
            language.run(config(tmp_path), corpus=other)


def test_a_short_corpus_is_refused(tmp_path, corpus):
    short = replace(corpus, test=corpus.test[:17])
    with pytest.raises(ConfigError, match="context is 16; expected at most 15: the corpus has"):
        language.run(config(tmp_path), corpus=short)


STANDARD = Parameterization.STANDARD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "muown", "parameterization": STANDARD}, "muown is for normalized weights"),
        ({"parameterization": STANDARD, "retract": True}, "retract is True; expected False"),
        ({"heads": 7}, "heads is 7; expected a divisor of 192"),
        ({"width": 18, "heads": 6}, "with heads of an even size"),
    ],
)
def test_impossible_configs(changes, message):
    with pytest.raises(ConfigError, match=message):
        Config(**changes)


def test_settings_without_effect_are_no_settings():
    plain = replace(PRESETS["demo"], parameterization=STANDARD)
    assert replace(plain, length_learning_rate=0.5, initial_g="one") == plain
    fixed = replace(PRESETS["demo"], optimizer="hyperball")
    others = {"length_learning_rate": 0.5, "weight_decay": 0.3, "retract": True, "initial_g": "one"}
    assert replace(fixed, **others) == fixed


def test_a_sweep_leaves_out_hyperball_without_weight_norm(tmp_path):
    axes, base = {"optimizer": ("muon", "hyperball")}, replace(TINY, out=tmp_path)
    plan = Grid("language", base, Config.COMPARED, axes=axes).plan()
    made = [(job.config.optimizer, str(job.config.parameterization)) for job in plan]
    assert made == [("muon", "standard"), ("muon", "weight-norm"), ("hyperball", "weight-norm")]
    impossible = Grid("language", base, (STANDARD,), axes={"optimizer": ("hyperball",)})
    with pytest.raises(ConfigError, match="no run"):
        impossible.plan()


# — the corpus —


def test_the_installed_package():
    corpus = load_torch_source()
    assert corpus.version == torch.__version__
    total = len(corpus.train) + len(corpus.test)
    assert total > 10_000_000
    assert 0.03 < len(corpus.test) / total < 0.2
    text = bytes(corpus.train[:100_000].tolist())
    assert b"import" in text
    assert load_torch_source().digest == corpus.digest


def write_files(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_files_are_sorted_and_split_by_path(tmp_path):
    names = [f"{folder}/file{i}.py" for folder in ("b", "a") for i in range(20)]
    write_files(tmp_path, names)
    (tmp_path / "note.txt").write_text("no source")
    corpus = load_torch_source(tmp_path)
    parts = {False: "", True: ""}
    for name in sorted(names):
        parts[is_held_out(name)] += f"# {name}\n"
    assert bytes(corpus.train.tolist()).decode() == parts[False]
    assert bytes(corpus.test.tolist()).decode() == parts[True]
    assert parts[True]
    (tmp_path / "a" / "file3.py").write_text("changed")
    assert load_torch_source(tmp_path).digest != corpus.digest


def test_without_sources(tmp_path):
    with pytest.raises(DataError, match=r"found 0 Python files .* install torch from a wheel"):
        load_torch_source(tmp_path)


def corpus_of(train, test):
    return Corpus(language._tensor(train), language._tensor(test), "", "")


def test_trigram_model_against_a_direct_computation():
    train, test = b"abracadabra abracadabra bar", b"abra cab barz"

    def probability(context, byte):
        if context is None:
            return 1 / 256
        follow = [train[i + len(context)] for i in range(len(train) - len(context))
                  if train[i : i + len(context)] == context]  # fmt: skip
        shorter = probability(context[1:] if context else None, byte)
        kinds = len(set(follow))
        if not follow:
            return shorter
        return (follow.count(byte) + kinds * shorter) / (len(follow) + kinds)

    bits = [-math.log2(probability(test[i : i + 2], test[i + 2])) for i in range(len(test) - 2)]
    expected = sum(bits) / len(bits)
    assert trigram_bits_per_byte(corpus_of(train, test)) == pytest.approx(expected)
