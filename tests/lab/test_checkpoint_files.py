"""Checkpoint files in and out: every kind, streamed, whole or not at all, nothing untrusted run."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations

from commands import weightnorm
from weightnorm import load_state_dict, weight_norm_model
from weightnorm.lab import checkpoint_files
from weightnorm.lab.checkpoint_files import convert_file, inspect_file
from weightnorm.lab.errors import FileError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def vocoder(flavour):
    """A stack of the kind whose published weights use weight norm."""
    model = nn.Sequential(
        nn.Conv1d(4, 8, 7), nn.ConvTranspose1d(8, 6, 4, stride=2), nn.Conv1d(6, 1, 3)
    )
    for i, layer in enumerate(model):
        flavour(layer, dim=int(i == 1))
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model


def state_of(kind):
    torch.manual_seed(3)
    flavour = {"hook": nn.utils.weight_norm, "parametrize": parametrizations.weight_norm}[kind]
    return {k: v.detach().clone() for k, v in vocoder(flavour).state_dict().items()}


def save(state, path):
    if path.suffix == ".safetensors":
        save_file(state, path, {"format": "pt"})
    elif path.name.endswith(".index.json"):
        halves = [dict([*state.items()][i::2]) for i in range(2)]  # g and v in different shards
        names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
        for name, half in zip(names, halves, strict=True):
            save_file(half, path.parent / name)
        home = {key: name for name, half in zip(names, halves, strict=True) for key in half}
        path.write_text(json.dumps({"metadata": {}, "weight_map": home}))
    else:
        torch.save({"generator": state, "steps": 7}, path)
    return path


def read(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.name.endswith(".index.json"):
        home = json.loads(path.read_text())["weight_map"]
        whole = {}
        for name in set(home.values()):
            whole.update(load_file(path.parent / name))
        assert set(whole) == set(home)
        return whole
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["steps"] == 7
    return checkpoint["generator"]


KINDS = ["model.pt", "model.pth", "model.bin", "model.safetensors", "model.safetensors.index.json"]
every_kind = pytest.mark.parametrize("name", KINDS)


@every_kind
@pytest.mark.parametrize("start", ["hook", "parametrize"])
def test_there_and_back_is_exact(tmp_path, name, start):
    other = {"hook": "parametrize", "parametrize": "hook"}[start]
    state = state_of(start)
    source = save(state, tmp_path / name)
    names = convert_file(source, tmp_path / "there" / name, other)
    assert {n.removeprefix("generator.") for n in names} == {f"{i}.weight" for i in range(3)}
    convert_file(tmp_path / "there" / name, tmp_path / "back" / name, start)
    back = read(tmp_path / "back" / name)
    assert set(back) == set(state)
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert not list(tmp_path.rglob(".*"))


@every_kind
def test_folded_files_are_the_plain_models(tmp_path, name):
    torch.manual_seed(3)
    model, x = vocoder(nn.utils.weight_norm), torch.randn(2, 4, 20)
    source = save(state_of("hook"), tmp_path / name)
    convert_file(source, tmp_path / "folded" / name, "folded")
    plain = nn.Sequential(
        nn.Conv1d(4, 8, 7), nn.ConvTranspose1d(8, 6, 4, stride=2), nn.Conv1d(6, 1, 3)
    )
    plain.load_state_dict(read(tmp_path / "folded" / name))
    torch.testing.assert_close(plain(x), model(x))


@every_kind
def test_plain_weights_are_decomposed_where_named(tmp_path, name):
    plain = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(3, 3))
    source = save(plain.state_dict(), tmp_path / name)
    convert_file(source, tmp_path / "out" / name, "parametrize", ("0.*",))
    state = read(tmp_path / "out" / name)
    assert "0.bias" in state  # a pattern may fit it, but it is no weight
    assert "0.parametrizations.weight.original0" in state
    assert "1.weight" in state
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(3, 3))
    weight_norm_model(model, where=lambda path, module: path == "0")
    load_state_dict(model, state)
    torch.testing.assert_close(model[0].weight, plain[0].weight)


@every_kind
def test_plain_weights_may_keep_another_axis(tmp_path, name):
    state = nn.ConvTranspose1d(4, 8, 3).state_dict()
    source, target = save(state, tmp_path / name), tmp_path / "out" / name
    convert_file(source, target, "hook", ("weight",), dim=1)
    assert read(target)["weight_g"].shape == (1, 8, 1)
    with pytest.raises(FileError, match="weight: dim=5 is out of range"):
        convert_file(source, tmp_path / "no" / name, "hook", ("weight",), dim=5)
    with pytest.raises(FileError, match="nothing to write as hook"):
        convert_file(source, tmp_path / "no" / name, "hook", ("misspelt",))
    assert not (tmp_path / "no" / name).exists()


def test_a_flat_g_needs_the_axis(tmp_path):
    state = {"w_v": torch.randn(3, 3), "w_g": torch.randn(3)}
    source = save(state, tmp_path / "a.safetensors")
    with pytest.raises(FileError, match=r"w: g of shape .* say which with dim"):
        convert_file(source, tmp_path / "b.safetensors", "folded")
    convert_file(source, tmp_path / "b.safetensors", "folded", dim=1)
    w = read(tmp_path / "b.safetensors")["w"]
    torch.testing.assert_close(w.norm(dim=0), state["w_g"].abs())


def test_a_shard_that_held_only_g_is_gone(tmp_path):
    name = "model.safetensors.index.json"
    state = state_of("hook")
    parts = {k: v for k, v in state.items() if not k.endswith("bias")}
    convert_file(save(parts, tmp_path / name), tmp_path / "out" / name, "folded")
    assert len(list((tmp_path / "out").glob("*-of-*"))) == 1
    assert set(read(tmp_path / "out" / name)) == {f"{i}.weight" for i in range(3)}


OTHER_TYPES = ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex64"]


def test_tensors_of_any_type_pass_through(tmp_path):
    others = {name: torch.ones(2, 2).to(getattr(torch, name)) for name in OTHER_TYPES}
    source = save({**state_of("hook"), **others}, tmp_path / "a.safetensors")
    convert_file(source, tmp_path / "b.safetensors", "folded")
    out = read(tmp_path / "b.safetensors")
    assert {name: out[name].dtype for name in others} == {n: t.dtype for n, t in others.items()}
    strange = {"scale": torch.ones(2).to(torch.float8_e8m0fnu)}
    with pytest.raises(FileError, match="scale is of type F8_E8M0, which is not known here"):
        convert_file(
            save(strange, tmp_path / "c.safetensors"), tmp_path / "d.safetensors", "folded"
        )


def test_half_types_keep_their_type(tmp_path):
    state = {k: v.to(torch.bfloat16) for k, v in state_of("hook").items()}
    source = save(state, tmp_path / "a.safetensors")
    for to in ("parametrize", "folded"):
        convert_file(source, tmp_path / f"{to}.safetensors", to)
        assert {t.dtype for t in read(tmp_path / f"{to}.safetensors").values()} == {torch.bfloat16}


def test_safetensors_are_held_one_weight_at_a_time(tmp_path, monkeypatch):
    source = save(state_of("hook"), tmp_path / "model.safetensors")
    alive, most = [], 0
    original = checkpoint_files.Shards.__getitem__

    def counted(self, key):
        import weakref

        nonlocal most
        tensor = original(self, key)
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(tensor))
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(checkpoint_files.Shards, "__getitem__", counted)
    convert_file(source, tmp_path / "folded.safetensors", "folded")
    assert 2 <= most <= 3  # a g and a v at a time


def test_the_table(tmp_path):
    state = state_of("parametrize")
    with torch.no_grad():
        state["0.parametrizations.weight.original0"][3] = 0
    rows, others = inspect_file(save(state, tmp_path / "model.pt"))
    assert [row.name for row in rows] == [f"generator.{i}.weight" for i in range(3)]
    assert [row.dim for row in rows] == [0, 1, 0]
    assert [row.dead for row in rows] == [1, 0, 0]
    assert [row.units for row in rows] == [8, 6, 1]
    v = state["0.parametrizations.weight.original1"]
    assert rows[0].v_norm == pytest.approx(v.flatten(1).norm(dim=1).mean().item())
    assert others == 3  # the biases


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_needs_code_is_refused(tmp_path):
    bad, witness = tmp_path / "bad.pt", tmp_path / "witness"
    torch.save({"state_dict": Evil(witness)}, bad)
    for act in (lambda: inspect_file(bad), lambda: convert_file(bad, tmp_path / "o.pt", "hook")):
        with pytest.raises(FileError, match="needs code to load, which is refused"):
            act()
    bad.write_bytes(pickle.dumps(Evil(witness)))
    with pytest.raises(FileError, match="refused"):
        inspect_file(bad)
    assert not witness.exists()
    assert not (tmp_path / "o.pt").exists()


@every_kind
def test_damaged_files_are_named_and_nothing_is_written(tmp_path, name):
    source = save(state_of("hook"), tmp_path / name)
    victim = next(tmp_path.glob("*-of-*"), source)
    victim.write_bytes(victim.read_bytes()[:200])
    with pytest.raises(FileError, match=r"is damaged|not an index"):
        convert_file(source, tmp_path / "out" / name, "folded")
    assert not (tmp_path / "out" / name).exists()
    assert not list(tmp_path.rglob(".*"))


def test_other_bad_input(tmp_path):
    source = save(state_of("hook"), tmp_path / "a.safetensors")
    with pytest.raises(FileError, match="would overwrite the input"):
        convert_file(source, source, "folded")
    with pytest.raises(FileError, match="conversion keeps the kind"):
        convert_file(source, tmp_path / "a.pt", "folded")
    with pytest.raises(FileError, match=r"a.zip: expected one of .pt"):
        inspect_file(tmp_path / "a.zip")
    with pytest.raises(FileError, match="is missing"):
        inspect_file(tmp_path / "b.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(FileError, match="holds a list; expected a state dict"):
        inspect_file(tmp_path / "list.pt")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(FileError, match="outside its folder, which is refused"):
        inspect_file(index)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileError, match=r"gone\.safetensors"):
        inspect_file(index)


def test_the_command_line(tmp_path):
    source = save(state_of("hook"), tmp_path / "old.pt")
    code, out, err = weightnorm("convert", source, tmp_path / "new.pt", "--to", "parametrize")
    assert code == 0, err
    assert "3 normalized weights" in out
    code, out, _ = weightnorm("inspect", tmp_path / "new.pt")
    assert code == 0
    assert "generator.1.weight" in out
    assert "3 normalized weights, 3 other tensors" in out
    code, _, err = weightnorm("convert", source, tmp_path / "x.pt", "--to", "hok")
    assert code == 2
    assert "did you mean --to hook?" in err
    code, _, err = weightnorm("inspect", tmp_path / "none.pt")
    assert code == 1
    assert "is missing" in err
