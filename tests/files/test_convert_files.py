"""Conversion and inspection of checkpoint files of every kind."""

import errno
import json
import os
import subprocess
import sys
import weakref
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from files.checkpoint_files import (
    KINDS,
    SHARDED,
    plain_vocoder,
    read,
    save,
    state_of,
    tree,
    vocoder,
)
from weightnorm import weight_norm
from weightnorm.checkpoints import StateDictError
from weightnorm.files import atomic, convert, safetensors_files
from weightnorm.files.convert import convert_file
from weightnorm.files.errors import FileError
from weightnorm.files.inspect import inspect_file
from weightnorm.files.nested import convert_nested, nested_mappings

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
every_kind = pytest.mark.parametrize("name", KINDS)


# — conversion —


@every_kind
@pytest.mark.parametrize("start", ["hook", "parametrize"])
def test_round_trip_is_exact(tmp_path, name, start):
    other = {"hook": "parametrize", "parametrize": "hook"}[start]
    state = state_of(start)
    source, there, back = (tmp_path / folder / name for folder in ("in", "there", "back"))
    names = convert_file(save(state, source), there, other).names
    assert {n.removeprefix("generator.") for n in names} == {f"{i}.weight" for i in range(3)}
    convert_file(there, back, start)
    result = read(back)
    assert set(result) == set(state)
    assert all(torch.equal(result[key], state[key]) for key in state)
    assert not list(tmp_path.rglob(".*"))


@every_kind
def test_folded_file_loads_into_the_plain_model(tmp_path, name):
    source, folded = save(state_of("hook"), tmp_path / name), tmp_path / "folded" / name
    convert_file(source, folded, "folded")
    plain, x = plain_vocoder(), torch.randn(2, 4, 20)
    plain.load_state_dict(read(folded))
    torch.testing.assert_close(plain(x), vocoder("hook")(x))


@every_kind
def test_plain_weights_are_decomposed_by_pattern(tmp_path, name):
    plain = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(3, 3))
    source = save(plain.state_dict(), tmp_path / name)
    convert_file(source, tmp_path / "out" / name, "parametrize", ("0.*",))
    state = read(tmp_path / "out" / name)
    assert {"0.bias", "0.parametrizations.weight.original0", "1.weight"} <= set(state)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(3, 3))
    weight_norm(model[0])
    model.load_state_dict(state)
    torch.testing.assert_close(model[0].weight, plain[0].weight)


@every_kind
def test_kept_axis_of_plain_weights(tmp_path, name):
    source = save(nn.ConvTranspose1d(4, 8, 3).state_dict(), tmp_path / name)
    full = "generator.weight" if name in ("model.pt", "model.bin") else "weight"
    convert_file(source, tmp_path / "out" / name, "hook", (full,), dim=1)
    assert read(tmp_path / "out" / name)["weight_g"].shape == (1, 8, 1)
    for weights, dim, message in (
        (("weight",), 5, "weight: dim=5 is out of range"),
        (("weight", "misspelt"), 1, "'misspelt' matches no weight"),
        ((), "infer", "nothing to write as hook"),
    ):
        with pytest.raises(FileError, match=message):
            convert_file(source, tmp_path / "no" / name, "hook", weights, dim)
    assert not (tmp_path / "no").exists()


def test_flat_g_needs_dim(tmp_path):
    state = {"w_v": torch.randn(3, 3), "w_g": torch.randn(3)}
    source = save(state, tmp_path / "a.safetensors")
    with pytest.raises(FileError, match=r"w: g of shape .* choose with dim"):
        convert_file(source, tmp_path / "b.safetensors", "folded")
    convert_file(source, tmp_path / "b.safetensors", "folded", dim=1)
    w = read(tmp_path / "b.safetensors")["w"]
    torch.testing.assert_close(w.norm(dim=0), state["w_g"].abs())


OTHER_TYPES = ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex64"]


def test_types_are_kept(tmp_path):
    others = {name: torch.ones(2, 2).to(getattr(torch, name)) for name in OTHER_TYPES}
    state = {k: v.to(torch.bfloat16) for k, v in state_of("hook").items()}
    source = save({**state, **others}, tmp_path / "a.safetensors")
    convert_file(source, tmp_path / "b.safetensors", "folded")
    out = read(tmp_path / "b.safetensors")
    assert {name: out.pop(name).dtype for name in others} == {n: t.dtype for n, t in others.items()}
    assert {t.dtype for t in out.values()} == {torch.bfloat16}
    unknown = save({"scale": torch.ones(2).to(torch.float8_e8m0fnu)}, tmp_path / "c.safetensors")
    with pytest.raises(FileError, match="scale has type F8_E8M0; supported are"):
        convert_file(unknown, tmp_path / "d.safetensors", "folded")


def test_safetensors_are_read_one_weight_at_a_time(tmp_path, monkeypatch):
    source = save(state_of("hook"), tmp_path / "model.safetensors")
    alive, most = [], 0
    original = safetensors_files.Shards.__getitem__

    def counted(self, key):
        nonlocal most
        tensor = original(self, key)
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(tensor))
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(safetensors_files.Shards, "__getitem__", counted)
    convert_file(source, tmp_path / "folded.safetensors", "folded")
    assert 2 <= most <= 3  # a g and a v at a time


@every_kind
def test_pairs_that_are_not_weight_norm_are_copied(tmp_path, name):
    state = {"attn.bias_g": torch.ones(3), "attn.bias_v": torch.ones(3), **state_of("hook")}
    source = save(state, tmp_path / name)
    contents = inspect_file(source)
    assert (len(contents.weights), contents.others) == (3, 5)
    convert_file(source, tmp_path / "out" / name, "folded")
    assert {"attn.bias_g", "attn.bias_v"} <= set(read(tmp_path / "out" / name))


@every_kind
def test_name_collisions_are_refused(tmp_path, name):
    state = {"w": torch.ones(4, 3), "w_g": torch.ones(4, 1), "w_v": torch.ones(4, 3)}
    source = save(state, tmp_path / name)
    with pytest.raises(FileError, match=rf"{name}: 'w(_v)?' and 'w(_v)?' would both become 'w'"):
        convert_file(source, tmp_path / "out" / name, "folded")
    assert not (tmp_path / "out").exists()


# — checkpoints with several state dicts —


def test_parts_of_a_checkpoint_that_are_left_alone_are_named(tmp_path):
    state, moments = state_of("hook"), {i: {"exp_avg": torch.ones(2)} for i in range(3)}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.8, 0.9)}]}
    checkpoint = {"generator": state, "optim_g": optimizer, "steps": torch.tensor(7)}
    torch.save(checkpoint, tmp_path / "do_00100000.pt")
    converted = convert_file(tmp_path / "do_00100000.pt", tmp_path / "out.pt", "folded")
    assert converted.names == [f"generator.{i}.weight" for i in range(3)]
    assert converted.untouched == {"optim_g": 3}
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.testing.assert_close(out["optim_g"], optimizer, rtol=0, atol=0)
    assert set(out["generator"]) == set(plain_vocoder().state_dict())
    assert convert_file(tmp_path / "out.pt", tmp_path / "again.pt", "folded").untouched == {}


def test_two_places_of_one_name_are_converted_each(tmp_path):
    hook = {"w_g": torch.ones(2, 1), "w_v": torch.eye(2)}
    torch.save({"a.b": hook, "a": {"b": {"u": torch.eye(2)}}}, tmp_path / "a.pt")
    convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "folded")
    out = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (set(out["a.b"]), set(out["a"]["b"])) == ({"w"}, {"u"})


def test_shared_and_cyclic_mappings_are_converted_once():
    def convert(state):
        seen.append(state)
        return {f"{key}!": value for key, value in state.items()}

    seen, inner = [], {"x": 1}
    checkpoint = {"model": inner, "ema": [inner, ("x", {"y": inner})], 3: {}, "lr": [1, 2]}
    checkpoint["self"] = checkpoint
    checkpoint["ema"].append(checkpoint["ema"])
    new = convert_nested(checkpoint, convert)
    assert new["model!"] == {"x!": 1}
    assert new["model!"] is new["ema!"][0] is new["ema!"][1][1]["y!"]
    assert new["ema!"][2] is new["ema!"]
    assert new["self!"] is new["self!"]["self!"]
    assert new["lr!"] == [1, 2]
    assert inner == {"x": 1}
    assert len(seen) == 4  # the checkpoint, inner, y and 3
    doubled = inner
    for _ in range(60):  # 2⁶⁰ paths, 61 mappings
        doubled = {"a": doubled, "b": doubled}
    assert len(nested_mappings(doubled)) == 61
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(StateDictError, match="nested more than 100 deep"):
        nested_mappings(deep)


def test_module_versions_are_kept(tmp_path):
    state = nn.utils.weight_norm(nn.Linear(2, 3)).state_dict()
    torch.save({"model": state}, tmp_path / "a.pt")
    convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "folded")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["model"]._metadata == state._metadata


# — inspection —


def test_inspect_file(tmp_path):
    state = state_of("parametrize")
    state["0.parametrizations.weight.original0"][3] = 0
    contents = inspect_file(save(state, tmp_path / "model.pt"))
    rows = contents.weights
    assert [row.name for row in rows] == [f"generator.{i}.weight" for i in range(3)]
    assert [row.dim for row in rows] == [0, 1, 0]
    assert [row.dead for row in rows] == [1, 0, 0]
    assert [row.units for row in rows] == [8, 6, 1]
    v = state["0.parametrizations.weight.original1"]
    assert rows[0].v_norm == pytest.approx(v.flatten(1).norm(dim=1).mean().item())
    assert contents.others == 3  # the biases


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    for name in ("a", "b"):  # an index that lists only one of them
        index.write_text(json.dumps({"weight_map": {"w": f"{name}.safetensors"}}))
        assert inspect_file(index).others == 1
    save_file({"w": torch.ones(2), "x": torch.ones(2)}, tmp_path / "b.safetensors")
    weight_map = {"w": "a.safetensors", "x": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileError, match=r"'w' is in two shards, a.safetensors and b.safetensors"):
        inspect_file(index)


# — writing —


@every_kind
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_existing_files_and_links_to_the_input_are_not_overwritten(tmp_path, name, link):
    (tmp_path / "out").mkdir()
    source, target = save(state_of("hook"), tmp_path / "in" / name), tmp_path / "out" / name
    link(source, target)
    os.symlink(tmp_path / "in", tmp_path / "alias")
    before = tree(tmp_path)
    for same in (target, tmp_path / "alias" / name, source):
        with pytest.raises(FileError, match="exists; delete it, or choose another folder or name"):
            convert_file(source, same, "folded")
    if name == SHARDED:  # another index, beside shards that exist
        with pytest.raises(FileError, match=r"00001-of-00002.safetensors: exists; delete it"):
            convert_file(source, source.with_name(f"new.{SHARDED}"), "folded")
    assert tree(tmp_path) == before


def test_unusable_paths_are_refused(tmp_path):
    source = save(state_of("hook"), tmp_path / "a.safetensors")
    index = tmp_path / "x.safetensors.index.json"
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for path, message in (
        ("a.zip", r"a.zip: expected one of .pt"),
        ("b.pt", "is missing"),
        ("list.pt", "contains a list; expected a state dict"),
        ("folder.pt", "folder.pt: is not a regular file"),
        ("pipe.pt", "pipe.pt: is not a regular file"),
    ):
        with pytest.raises(FileError, match=message):
            inspect_file(tmp_path / path)
    for weight_map, message in (
        ({"a": "../../etc/passwd"}, r"expected .safetensors files beside it"),
        ({"a": "gone.safetensors"}, r"gone\.safetensors: is missing"),
        ({}, "lists no weights"),
        ([], "is not an index of shards"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FileError, match=message):
            inspect_file(index)
    with pytest.raises(FileError, match="conversion keeps the kind"):
        convert_file(source, tmp_path / "a.pt", "folded")
    with pytest.raises(FileError, match="cannot be written"):
        convert_file(source, source / "b.safetensors", "folded")


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_full_disk_leaves_nothing(tmp_path, monkeypatch, fails_at):
    source, target = save(state_of("hook"), tmp_path / SHARDED), tmp_path / "out" / SHARDED
    count = 0

    @contextmanager
    def writer(path):
        nonlocal count
        count += 1
        with original(path) as file:
            yield file
            if count == fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = atomic.atomic_writer
    for module in (atomic, convert, safetensors_files):
        monkeypatch.setattr(module, "atomic_writer", writer)
    before = tree(tmp_path)
    with pytest.raises(FileError, match=r"out/.*: cannot be written: No space left on device"):
        convert_file(source, target, "folded")
    assert tree(tmp_path) == before


def test_killed_conversion_leaves_no_index(tmp_path):
    source, target = save(state_of("hook"), tmp_path / SHARDED), tmp_path / "out" / SHARDED
    script = f"""
import os
from pathlib import Path
from weightnorm.files import safetensors_files
from weightnorm.files.convert import convert_file
safetensors_files.write_atomically = lambda *_: os._exit(9)
convert_file(Path({str(source)!r}), Path({str(target)!r}), "folded")
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert not target.exists()
    with pytest.raises(FileError, match=r"of-00002.safetensors: exists; delete it"):
        convert_file(source, target, "folded")
