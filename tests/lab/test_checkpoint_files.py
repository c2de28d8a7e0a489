"""Inspection and conversion of checkpoint files of every kind, damaged and malicious ones too."""

import errno
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations

from commands import environment, weightnorm
from weightnorm import load_state_dict, weight_norm_model
from weightnorm.checkpoints import part_keys
from weightnorm.lab import checkpoint_files, files, safetensors_writer
from weightnorm.lab.checkpoint_files import convert_file, inspect_file
from weightnorm.lab.cli import console
from weightnorm.lab.cli.main import main
from weightnorm.lab.cli.verbs import VERBS
from weightnorm.lab.errors import FileError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def vocoder(normalize):
    """A stack of convolutions as in vocoders, whose published weights use weight norm."""
    model = nn.Sequential(
        nn.Conv1d(4, 8, 7), nn.ConvTranspose1d(8, 6, 4, stride=2), nn.Conv1d(6, 1, 3)
    )
    for i, layer in enumerate(model):
        normalize(layer, dim=int(i == 1))
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model


def state_of(kind):
    torch.manual_seed(3)
    normalize = {"hook": nn.utils.weight_norm, "parametrize": parametrizations.weight_norm}[kind]
    return {k: v.detach().clone() for k, v in vocoder(normalize).state_dict().items()}


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
def test_round_trip_is_exact(tmp_path, name, start):
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
def test_folded_file_loads_into_the_plain_model(tmp_path, name):
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
def test_named_plain_weights_are_decomposed(tmp_path, name):
    plain = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(3, 3))
    source = save(plain.state_dict(), tmp_path / name)
    convert_file(source, tmp_path / "out" / name, "parametrize", ("0.*",))
    state = read(tmp_path / "out" / name)
    assert "0.bias" in state  # the pattern matches it, but it is a vector
    assert "0.parametrizations.weight.original0" in state
    assert "1.weight" in state
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(3, 3))
    weight_norm_model(model, where=lambda path, module: path == "0")
    load_state_dict(model, state)
    torch.testing.assert_close(model[0].weight, plain[0].weight)


@every_kind
def test_plain_weights_with_another_kept_axis(tmp_path, name):
    state = nn.ConvTranspose1d(4, 8, 3).state_dict()
    source, target = save(state, tmp_path / name), tmp_path / "out" / name
    convert_file(source, target, "hook", ("weight",), dim=1)
    assert read(target)["weight_g"].shape == (1, 8, 1)
    with pytest.raises(FileError, match="weight: dim=5 is out of range"):
        convert_file(source, tmp_path / "no" / name, "hook", ("weight",), dim=5)
    with pytest.raises(FileError, match="'misspelt' matches no weight"):
        convert_file(source, tmp_path / "no" / name, "hook", ("misspelt",))
    assert not (tmp_path / "no" / name).exists()


def test_flat_g_needs_dim(tmp_path):
    state = {"w_v": torch.randn(3, 3), "w_g": torch.randn(3)}
    source = save(state, tmp_path / "a.safetensors")
    with pytest.raises(FileError, match=r"w: g of shape .* choose with dim"):
        convert_file(source, tmp_path / "b.safetensors", "folded")
    convert_file(source, tmp_path / "b.safetensors", "folded", dim=1)
    w = read(tmp_path / "b.safetensors")["w"]
    torch.testing.assert_close(w.norm(dim=0), state["w_g"].abs())


def test_shard_without_tensors_is_not_written(tmp_path):
    name = "model.safetensors.index.json"
    state = state_of("hook")
    parts = {k: v for k, v in state.items() if not k.endswith("bias")}
    convert_file(save(parts, tmp_path / name), tmp_path / "out" / name, "folded")
    assert len(list((tmp_path / "out").glob("*-of-*"))) == 1
    assert set(read(tmp_path / "out" / name)) == {f"{i}.weight" for i in range(3)}


OTHER_TYPES = ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex64"]


def test_tensors_of_every_type_are_copied(tmp_path):
    others = {name: torch.ones(2, 2).to(getattr(torch, name)) for name in OTHER_TYPES}
    source = save({**state_of("hook"), **others}, tmp_path / "a.safetensors")
    convert_file(source, tmp_path / "b.safetensors", "folded")
    out = read(tmp_path / "b.safetensors")
    assert {name: out[name].dtype for name in others} == {n: t.dtype for n, t in others.items()}
    unknown = {"scale": torch.ones(2).to(torch.float8_e8m0fnu)}
    with pytest.raises(FileError, match="scale has type F8_E8M0; supported are"):
        convert_file(
            save(unknown, tmp_path / "c.safetensors"), tmp_path / "d.safetensors", "folded"
        )


def test_half_precision_is_kept(tmp_path):
    state = {k: v.to(torch.bfloat16) for k, v in state_of("hook").items()}
    source = save(state, tmp_path / "a.safetensors")
    for to in ("parametrize", "folded"):
        convert_file(source, tmp_path / f"{to}.safetensors", to)
        assert {t.dtype for t in read(tmp_path / f"{to}.safetensors").values()} == {torch.bfloat16}


def test_safetensors_are_read_one_weight_at_a_time(tmp_path, monkeypatch):
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


def test_inspect_file(tmp_path):
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


class ExecutesCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_that_need_code_are_refused(tmp_path):
    bad, evidence = tmp_path / "bad.pt", tmp_path / "evidence"
    torch.save({"state_dict": ExecutesCode(evidence)}, bad)
    for act in (lambda: inspect_file(bad), lambda: convert_file(bad, tmp_path / "o.pt", "hook")):
        with pytest.raises(
            FileError, match=r"contains \S*mkdir, which needs code to load and is refused"
        ):
            act()
    bad.write_bytes(pickle.dumps(ExecutesCode(evidence)))
    with pytest.raises(FileError, match="refused"):
        inspect_file(bad)
    assert not evidence.exists()
    assert not (tmp_path / "o.pt").exists()


@every_kind
def test_truncated_files_are_named_and_nothing_is_written(tmp_path, name):
    source = save(state_of("hook"), tmp_path / name)
    victim = next(tmp_path.glob("*-of-*"), source)
    victim.write_bytes(victim.read_bytes()[:200])
    with pytest.raises(FileError, match=rf"{re.escape(str(victim))}: is damaged"):
        convert_file(source, tmp_path / "out" / name, "folded")
    assert not (tmp_path / "out" / name).exists()
    assert not list(tmp_path.rglob(".*"))


def test_unusable_paths_are_refused(tmp_path):
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
    with pytest.raises(FileError, match="contains a list; expected a state dict"):
        inspect_file(tmp_path / "list.pt")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(FileError, match=r"expected .safetensors files beside it"):
        inspect_file(index)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileError, match=r"gone\.safetensors"):
        inspect_file(index)


def test_files_that_are_not_regular_are_refused(tmp_path):
    folder, pipe = tmp_path / "folder.pt", tmp_path / "pipe.pt"
    folder.mkdir()
    os.mkfifo(pipe)
    with pytest.raises(FileError, match=r"folder.pt: is a folder"):
        inspect_file(folder)
    with pytest.raises(FileError, match=r"pipe.pt: is not a regular file"):
        inspect_file(pipe)
    source = save(state_of("hook"), tmp_path / "a.pt")
    for target in (folder, source / "b.pt"):
        with pytest.raises(FileError, match="cannot be written"):
            convert_file(source, target, "folded")


# — names —


@every_kind
def test_name_collisions_are_refused(tmp_path, name):
    state = {"w": torch.ones(4, 3), "w_g": torch.ones(4, 1), "w_v": torch.ones(4, 3)}
    source = save(state, tmp_path / name)
    with pytest.raises(FileError, match=rf"{name}: 'w(_v)?' and 'w(_v)?' would both become 'w'"):
        convert_file(source, tmp_path / "out" / name, "folded")
    assert not (tmp_path / "out" / name).exists()


@every_kind
def test_pairs_that_are_not_weight_norm_are_copied(tmp_path, name):
    state = {"attn.bias_g": torch.ones(3), "attn.bias_v": torch.ones(3), **state_of("hook")}
    source = save(state, tmp_path / name)
    rows, others = inspect_file(source)
    assert (len(rows), others) == (3, 5)
    convert_file(source, tmp_path / "out" / name, "folded")
    assert {"attn.bias_g", "attn.bias_v"} <= set(read(tmp_path / "out" / name))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    for name in ("a", "b"):  # an index that lists only one of them
        index.write_text(json.dumps({"weight_map": {"w": f"{name}.safetensors"}}))
        assert inspect_file(index) == ([], 1)
    save_file({"w": torch.ones(2), "x": torch.ones(2)}, tmp_path / "b.safetensors")
    home = {"w": "a.safetensors", "x": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": home}))
    with pytest.raises(FileError, match=r"'w' is in two shards, a.safetensors and b.safetensors"):
        inspect_file(index)


CONTROL = "a\x1b[2J\r\nb\u202e"


@every_kind
def test_control_characters_are_escaped(tmp_path, name, capsys, monkeypatch):
    monkeypatch.setattr(console.OUT, "width", 200)
    state = {f"{CONTROL}.w_g": torch.ones(4, 1), f"{CONTROL}.w_v": torch.ones(4, 3)}
    source = save(state, tmp_path / name)
    assert main(["inspect", str(source)]) == 0
    save({**state, f"{CONTROL}.w": torch.ones(4, 3)}, source)
    assert main(["convert", str(source), str(tmp_path / "o" / name), "--to", "folded"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"a\\x1b\[2J\\r\\nb\\u202e", re.sub(r"\s", "", out))
    assert "\\x1b" in err
    assert not set(CONTROL) & set(out + err) - {"\n", "a", "b", "[", "2", "J"}


# — overwriting —


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@every_kind
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_input_through_a_link_is_refused(tmp_path, name, link):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    source, target = save(state_of("hook"), tmp_path / "in" / name), tmp_path / "out" / name
    link(source, target)
    os.symlink(tmp_path / "in", tmp_path / "alias")
    before = tree(tmp_path)
    for same in (target, tmp_path / "alias" / name, source):
        with pytest.raises(FileError, match="would overwrite the input"):
            convert_file(source, same, "folded")
    assert tree(tmp_path) == before


SHARDED = "model.safetensors.index.json"


def failing_writer(monkeypatch, fails_at):
    """Let the given atomic write of a conversion raise as for a full disk."""
    count = 0
    original = files.atomic_writer

    @contextmanager
    def writer(path):
        nonlocal count
        count += 1
        with original(path) as file:
            yield file
            if count == fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in (files, safetensors_writer, checkpoint_files):
        monkeypatch.setattr(module, "atomic_writer", writer)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("earlier", [False, True])
def test_sharded_output_is_whole_or_absent(tmp_path, monkeypatch, earlier, fails_at):
    source, target = save(state_of("hook"), tmp_path / SHARDED), tmp_path / "out" / SHARDED
    if earlier:
        convert_file(source, target, "parametrize")
    (tmp_path / "out").mkdir(exist_ok=True)
    before = tree(tmp_path)
    failing_writer(monkeypatch, fails_at)
    with pytest.raises(FileError, match=r"out/.*: cannot be written: No space left on device"):
        convert_file(source, target, "folded")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("killed_at", [2, 3])
def test_killed_sharded_conversion_leaves_the_earlier_output(tmp_path, killed_at):
    source, target = save(state_of("hook"), tmp_path / SHARDED), tmp_path / "out" / SHARDED
    convert_file(source, target, "parametrize")
    expected = read(target)
    script = f"""
import os, sys
from pathlib import Path
from weightnorm.lab.checkpoint_files import convert_file
replace, count = Path.replace, 0
def killed(self, path):
    global count
    count += 1
    if count == {killed_at}:
        os._exit(9)
    return replace(self, path)
Path.replace = killed
convert_file(Path({str(source)!r}), Path({str(target)!r}), "folded")
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    out = read(target)
    assert set(out) == set(expected)
    assert all(torch.equal(out[key], expected[key]) for key in out)


def test_sharded_output_replaces_an_earlier_one(tmp_path):
    source, target = save(state_of("hook"), tmp_path / SHARDED), tmp_path / "out" / SHARDED
    (tmp_path / "out").mkdir()
    other = tmp_path / "out" / "other.safetensors"
    other.write_bytes(b"not part of it")
    for to in ("parametrize", "hook", "folded", "hook"):
        convert_file(source, target, to)
        shards = set(json.loads(target.read_text())["weight_map"].values())
        assert {p.name for p in target.parent.iterdir()} == {*shards, SHARDED, other.name}
    state = state_of("hook")
    assert all(torch.equal(read(target)[key], state[key]) for key in state)


def test_shards_that_another_index_lists_are_kept(tmp_path):
    source, target = save(state_of("hook"), tmp_path / SHARDED), tmp_path / "out" / SHARDED
    convert_file(source, target, "parametrize")
    second = target.with_name(f"second.{SHARDED}")
    second.write_bytes(target.read_bytes())
    expected = read(second)
    convert_file(source, target, "folded")
    assert all(torch.equal(read(second)[key], x) for key, x in expected.items())


# — malicious pickles —


class Claim:
    """Pickles as a tensor of any size and strides over a storage of 4 numbers."""

    def __init__(self, sizes, strides, numel=4):
        self.sizes, self.strides, self.numel = sizes, strides, numel

    def __reduce__(self):
        arguments = (Storage(self.numel), 0, self.sizes, self.strides, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


@dataclass
class Storage:
    numel: int


class ClaimPickler(pickle._Pickler):
    legacy = False

    def persistent_id(self, value):
        if isinstance(value, Storage):
            view = (None,) if self.legacy else ()
            return ("storage", torch.FloatStorage, "0", "cpu", value.numel, *view)
        return None


def write_archive(path, state):
    """Write torch's zip format with a storage of 4 numbers."""
    buffer = io.BytesIO()
    ClaimPickler(buffer, 2).dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", struct.pack("4f", 1, 2, 3, 4))
        archive.writestr("archive/version", "3\n")


def write_legacy(path, state):
    """Write torch's format before 1.6 with a storage of 4 numbers."""
    with path.open("wb") as file:
        for header in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
            pickle.dump(header, file, 2)
        pickler = ClaimPickler(file, 2)
        pickler.legacy = True
        pickler.dump(state)
        pickle.dump(["0"], file, 2)
        file.write(struct.pack("<q", 4) + struct.pack("4f", 1, 2, 3, 4))


writers = pytest.mark.parametrize("write", [write_archive, write_legacy])


@writers
def test_handmade_pickles_are_read(tmp_path, write):
    write(tmp_path / "a.pt", {"w_v": Claim((2, 2), (2, 1)), "w_g": Claim((2, 1), (1, 1))})
    ((row,), others) = inspect_file(tmp_path / "a.pt")
    assert (row.shape, row.dim, row.g, others) == ((2, 2), 0, 1.5, 0)


TERA = 10**12
CLAIMS = {
    "expanded": Claim((TERA, 4), (0, 1)),
    "expanded v": Claim((TERA, 1), (0, 0)),
    "beyond its storage": Claim((2, 4), (4, 1)),
    "terabytes beyond its storage": Claim((TERA, 4), (4, 1)),
    "wide strides": Claim((2, 2), (TERA, 1)),
    "negative strides": Claim((2, 2), (-2, 1)),
    "a large storage": Claim((TERA, 4), (4, 1), numel=4 * TERA),
    "overflowing sizes": Claim((2**62, 2**62), (0, 0)),
    "negative storage": Claim((2, 2), (2, 1), numel=-4),
}


@writers
@pytest.mark.parametrize("claim", CLAIMS)
def test_sizes_that_the_file_does_not_contain_are_refused(tmp_path, write, claim):
    for number, key in enumerate(["w_v", "buffer", "w"]):
        path = tmp_path / f"{number}.pt"
        write(path, {key: CLAIMS[claim], "w_g": Claim((), ())})
        assert path.stat().st_size < 2000
        with pytest.raises(FileError, match=rf"{path}: "):
            inspect_file(path)
        with pytest.raises(FileError, match=rf"{path}: "):
            convert_file(path, tmp_path / "out.pt", "hook", ("w",) if key == "w" else ())
    assert not (tmp_path / "out.pt").exists()


def test_deeply_nested_pickles_are_refused(tmp_path):
    depth, path = 100_000, tmp_path / "deep.pt"
    nested = b"\x80\x02" + b"}X\x01\x00\x00\x00a" * depth + b"}" + b"s" * depth + b"."
    write_archive(path, {})
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**entries, "archive/data.pkl": nested}.items():
            archive.writestr(name, content)
    with pytest.raises(FileError, match=r"deep.pt: mappings are nested more than 100 deep"):
        inspect_file(path)


def test_flipped_bytes_of_a_pickle_are_noticed(tmp_path):
    source = save(state_of("hook"), tmp_path / "a.pt")
    state, content = state_of("hook"), source.read_bytes()
    start = content.index(state["1.weight_v"].numpy().tobytes())
    source.write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])
    with pytest.raises(FileError, match=r"a.pt: is damaged: the checksum of .* does not match"):
        inspect_file(source)


# — random files —

EXAMPLES = {"max_examples": 150, "derandomize": True, "deadline": None, "database": None}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A file of each kind, and torch's older format, with what they contain."""
    folder, state = tmp_path_factory.mktemp("originals"), state_of("hook")
    small = {key: value for key, value in state.items() if key.startswith("2.")}
    for name in ("model.pt", "model.safetensors", SHARDED):
        save(small, folder / name)
    legacy = {"generator": small, "steps": 7}
    torch.save(legacy, folder / "legacy.bin", _use_new_zipfile_serialization=False)
    return folder, small


def check_outcome(folder, name, small):
    """Inspect and convert: each succeeds or raises a FileError; returns the converted tensors."""
    before = tree(folder)
    try:
        inspect_file(folder / name)
        convert_file(folder / name, folder / "out" / name, "parametrize")
        back = folder / "back" / name
        convert_file(folder / "out" / name, back, "hook")
    except FileError as error:
        names_a_file, back = str(folder) in str(error), None
    else:
        names_a_file = True
    assert names_a_file
    after = tree(folder)
    assert {path: after[path] for path in before} == before  # the input is untouched
    assert not any(path.name.startswith(".") for path in after)
    return back


@pytest.mark.parametrize("name", ["model.pt", "legacy.bin", "model.safetensors", SHARDED])
@settings(**EXAMPLES)
@given(data=st.data())
def test_random_damage_is_an_error_or_harmless(originals, name, data):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for path in originals[0].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        shards = sorted(folder.glob("*-of-*")) if name == SHARDED else []
        victim = data.draw(st.sampled_from([folder / name, *shards]))
        content = bytearray(victim.read_bytes())
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        else:
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(
                    st.integers(1, 255)
                )
        victim.write_bytes(content)
        back = check_outcome(folder, name, originals[1])
        if back is not None and name == "model.pt":  # it has checksums: what is read is exact
            assert all(torch.equal(read(back)[key], x) for key, x in originals[1].items())


@settings(**EXAMPLES)
@given(st.binary(max_size=300), st.sampled_from(["m.pt", "m.safetensors", SHARDED]))
def test_random_bytes_are_refused(content, name):
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / name).write_bytes(content)
        assert check_outcome(Path(temporary), name, {}) is None


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([torch.float32, torch.Size([2]), slice(3), complex(1, 2), b"x", {1, 2}]),
    st.sampled_from([torch.ones(2, 2), torch.ones(2, 1), torch.ones(()), torch.ones(2).int(),
                     torch.ones(2, 2).to_sparse(), torch.ones(2, 2, device="meta"),
                     torch.ones(2, 2).to(torch.float8_e5m2), torch.ones(1).expand(2, 2)]),
)  # fmt: skip
PICKLE_KEYS = st.one_of(
    st.sampled_from(["w", "w_g", "w_v", *part_keys("w", "parametrize"), "a.w_g", "a.w_v"]),
    st.integers(0, 3), st.none(), st.text(max_size=3), st.tuples(st.integers(0, 2)),
)  # fmt: skip
PICKLES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.dictionaries(PICKLE_KEYS, inner, max_size=5), st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(**EXAMPLES)
@given(st.dictionaries(PICKLE_KEYS, PICKLES, max_size=5), st.booleans(), st.booleans())
def test_random_pickles_are_read_or_refused(value, cyclic, executes):
    with tempfile.TemporaryDirectory() as temporary:
        evidence = Path(temporary) / "evidence"
        if cyclic:
            value["self"] = {"again": value}
        if executes:
            value["code"] = ExecutesCode(evidence)
        torch.save(value, Path(temporary) / "m.pt")
        check_outcome(Path(temporary), "m.pt", {})
        assert not evidence.exists()


# — commands —


def test_commands(tmp_path, capsys):
    source, new = save(state_of("hook"), tmp_path / "old.pt"), tmp_path / "new.pt"
    code, out, err = weightnorm("convert", source, new, "--to", "parametrize")
    assert code == 0, err
    assert "3 normalized weights" in out
    assert main(["inspect", str(new)]) == 0
    out = capsys.readouterr().out
    assert "generator.1.weight" in out
    assert "3 normalized weights, 3 other tensors" in out
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(source), str(new), "--to", "hok"])
    assert stop.value.code == 2
    assert "did you mean --to hook?" in capsys.readouterr().err
    code, _, err = weightnorm("inspect", tmp_path / "none.pt")
    assert code == 1
    assert err == f"failed: {tmp_path / 'none.pt'}: is missing\n"


def test_long_names_are_not_cut(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console.OUT, "width", 80)
    name = (
        ".".join(["decoder", "blocks", "17", "convolution_of_the_residual_branch"] * 2) + ".weight"
    )
    parts = {f"{name}_g": torch.ones(1024, 1, 1), f"{name}_v": torch.ones(1024, 512, 7)}
    assert main(["inspect", str(save(parts, tmp_path / "m.safetensors"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line.split()[0] for line in lines[1:-1]) == name
    assert "1024×512×7" in lines[1]


WITHOUT = ["numpy", "sklearn", "matplotlib", "ale_py", "gymnasium", "jinja2", "pooch",
           "tensorboard", "PIL", "pandas", "scipy"]  # fmt: skip
BLOCKED = """
import contextlib, io, json, sys
blocked, commands = map(json.loads, sys.argv[1:])
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from weightnorm.lab.cli.main import main
results = []
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out, \\
         contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def run_without(packages, commands):
    """Run commands in a process that cannot import the packages: (code, output, errors) of each."""
    arguments = [json.dumps(packages), json.dumps(commands)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCKED, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_commands_for_files_need_only_the_extra_files(tmp_path):
    commands = []
    for name in ("model.pt", "model.safetensors", SHARDED):
        source, out = str(save(state_of("hook"), tmp_path / name)), str(tmp_path / "out" / name)
        commands += [["convert", source, out, "--to", "folded"], ["inspect", source]]
    for code, out, err in run_without(WITHOUT, commands):
        assert code == 0, err
        assert "3 normalized weights" in out


def test_without_extras_help_works_and_verbs_name_their_extra():
    packages = [*WITHOUT, "rich", "tyro", "safetensors"]
    (code, overview, _), (other, version, _), *verbs = run_without(
        packages, [["--help"], ["--version"], *([verb] for verb in VERBS)]
    )
    assert (code, other) == (0, 0)
    assert all(f"weightnorm {verb}" in overview for verb in VERBS)
    assert version.startswith("weightnorm ")
    for name, (code, _, err) in zip(VERBS, verbs, strict=True):
        assert code == 1
        assert re.match(f"failed: weightnorm {name} needs the package \\w+", err)
        assert f"pip install 'weightnorm[{VERBS[name].extra}]'" in err


def test_the_extra_files_lists_what_is_imported():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras["files"]) == {"safetensors", "rich", "tyro"}
    assert {verb.extra for verb in VERBS.values()} <= set(extras)


def test_document_has_the_counts_of_the_tests():
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    cases = EXAMPLES["max_examples"]
    assert f"{cases} random pickles" in page
    assert f"{4 * cases} files with random truncation or changed bytes, {cases} of random" in page
    assert f"{len(CLAIMS)} claims" in page
