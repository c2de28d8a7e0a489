"""Conversion and inspection of checkpoint files of every kind."""

import errno
import json
import os
import subprocess
import sys

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
from weightnorm.files.convert import convert_file
from weightnorm.files.errors import FileError
from weightnorm.files.inspect import inspect_file

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
def test_plain_weights_are_decomposed_by_name_or_pattern(tmp_path, name):
    plain = nn.Sequential(nn.ConvTranspose1d(4, 8, 3), nn.Linear(3, 3))
    source, target = save(plain.state_dict(), tmp_path / name), tmp_path / "out" / name
    full = "generator.0.weight" if name in ("model.pt", "model.bin") else "0.weight"
    for weights, dim, message in (
        (("0.weight",), 5, "0.weight: dim=5 is out of range"),
        (("0.*", "misspelt"), 1, "'misspelt' matches no weight"),
        ((), "infer", "nothing to write as parametrize"),
    ):
        with pytest.raises(FileError, match=message):
            convert_file(source, target, "parametrize", weights, dim)
        assert not target.parent.exists()
    convert_file(source, target, "parametrize", (full,), dim=1)
    model = nn.Sequential(nn.ConvTranspose1d(4, 8, 3), nn.Linear(3, 3))
    weight_norm(model[0])
    assert read(target).keys() == model.state_dict().keys()
    model.load_state_dict(read(target))
    torch.testing.assert_close(model[0].weight, plain[0].weight)


def test_types_and_metadata_are_kept(tmp_path):
    types = ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex64", "bool"]
    others = {name: torch.ones(2, 2).to(getattr(torch, name)) for name in types}
    state = {k: v.to(torch.bfloat16) for k, v in state_of("hook").items()}
    source = save({**state, **others}, tmp_path / "a.safetensors")
    convert_file(source, tmp_path / "b.safetensors", "folded")
    out = read(tmp_path / "b.safetensors")
    assert {name: out.pop(name).dtype for name in others} == {n: t.dtype for n, t in others.items()}
    assert {t.dtype for t in out.values()} == {torch.bfloat16}
    assert b'"format":"pt"' in (tmp_path / "b.safetensors").read_bytes()
    versioned = nn.utils.weight_norm(nn.Linear(2, 3)).state_dict()
    torch.save({"model": versioned}, tmp_path / "a.pt")
    convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "folded")
    new = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    assert new._metadata == versioned._metadata


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


def test_shared_and_cyclic_mappings_are_converted_once(tmp_path):
    hook = {"w_g": torch.ones(2, 1), "w_v": torch.eye(2)}
    checkpoint = {"a.b": hook, "a": {"b": {"u": torch.eye(2)}}, "ema": [hook, ("x", {"y": hook})]}
    checkpoint["self"] = checkpoint
    checkpoint["ema"].append(checkpoint["ema"])
    doubled = {}
    for _ in range(60):  # 2⁶⁰ paths, 61 mappings
        doubled = {"a": doubled, "b": doubled}
    torch.save({**checkpoint, "doubled": doubled}, tmp_path / "a.pt")
    assert convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "folded").names[0] == "a.b.w"
    new = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (set(new["a.b"]), set(new["a"]["b"])) == ({"w"}, {"u"})
    assert new["a.b"] is new["ema"][0] is new["ema"][1][1]["y"]
    assert new["ema"][2] is new["ema"]
    assert new["self"]["self"] is new["self"]


# — inspection —


def test_inspect_file(tmp_path):
    state = state_of("parametrize")
    state["0.parametrizations.weight.original0"][3] = 0
    state |= {"attn.bias_g": torch.ones(3), "attn.bias_v": torch.ones(3)}  # not weight norm
    contents = inspect_file(save(state, tmp_path / "model.pt"))
    rows = contents.weights
    assert [row.name for row in rows] == [f"generator.{i}.weight" for i in range(3)]
    assert [(row.dim, row.dead, row.units) for row in rows] == [(0, 1, 8), (1, 0, 6), (0, 0, 1)]
    v = state["0.parametrizations.weight.original1"]
    assert rows[0].v_norm == pytest.approx(v.flatten(1).norm(dim=1).mean().item())
    assert contents.others == 5  # the biases and the other pair


# — reading and writing —


def test_shards_that_disagree_with_their_index_are_refused(tmp_path):
    index = tmp_path / SHARDED
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(2), "x": torch.ones(2)}, tmp_path / "b.safetensors")
    for weight_map, message in (
        ({"w": "a.safetensors", "x": "b.safetensors"}, r"'w' is in two shards, a.* and b.safet"),
        ({"w": "b.safetensors"}, "does not list what its shards contain: 'x'"),
        ({"w": "../../etc/passwd.safetensors"}, "is not an index of shards"),
        ({"w": "gone.safetensors"}, r"gone\.safetensors: cannot be read: No such"),
        ({}, "is not an index of shards"),
        ([], "is not an index of shards"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FileError, match=message):
            inspect_file(index)


@every_kind
def test_existing_files_and_links_to_the_input_are_not_overwritten(tmp_path, name):
    (tmp_path / "out").mkdir()
    source, target = save(state_of("hook"), tmp_path / "in" / name), tmp_path / "out" / name
    os.symlink(source, target)
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
    (tmp_path / "folder.pt").mkdir()
    torch.save([1, 2], tmp_path / "list.pt")
    for path, message in (
        ("a.zip", r"a.zip: expected one of .pt"),
        ("b.pt", "b.pt: cannot be read: No such file"),
        ("list.pt", "contains a list; expected a state dict"),
        ("folder.pt", "folder.pt: cannot be read: Is a directory"),
    ):
        with pytest.raises(FileError, match=message):
            inspect_file(tmp_path / path)
    with pytest.raises(FileError, match="conversion keeps the kind"):
        convert_file(source, tmp_path / "a.pt", "folded")
    with pytest.raises(FileError, match="cannot be written"):
        convert_file(source, source / "b.safetensors", "folded")


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_full_disk_leaves_nothing(tmp_path, monkeypatch, fails_at):
    source, target = save(state_of("hook"), tmp_path / SHARDED), tmp_path / "out" / SHARDED
    calls = []

    def fsync(file):
        calls.append(file)
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
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
