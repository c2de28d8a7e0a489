"""Checkpoint files that are damaged, made to harm, or random."""

import io
import os
import pickle
import re
import struct
import tempfile
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from files.checkpoint_files import KINDS, SHARDED, read, save, state_of, tree
from weightnorm.checkpoints import part_keys
from weightnorm.files.convert import convert_file
from weightnorm.files.errors import FileError
from weightnorm.files.inspect import inspect_file

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


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


@pytest.mark.parametrize("name", KINDS)
def test_truncated_files_are_named_and_nothing_is_written(tmp_path, name):
    source = save(state_of("hook"), tmp_path / name)
    victim = next(tmp_path.glob("*-of-*"), source)
    victim.write_bytes(victim.read_bytes()[:200])
    with pytest.raises(FileError, match=rf"{re.escape(str(victim))}: is damaged"):
        convert_file(source, tmp_path / "out" / name, "folded")
    assert not (tmp_path / "out" / name).exists()
    assert not list(tmp_path.rglob(".*"))


CONTROL = "a\x1b[2J\r\nb\u202e"


@pytest.mark.parametrize("name", KINDS)
def test_control_characters_are_escaped_in_errors(tmp_path, name):
    shapes = {"w": (4, 3), "w_g": (4, 1), "w_v": (4, 3)}
    state = {f"{CONTROL}.{w}": torch.ones(shape) for w, shape in shapes.items()}
    source = save(state, tmp_path / name)
    with pytest.raises(FileError) as error:
        convert_file(source, tmp_path / "out" / name, "folded")
    assert r"a\x1b[2J\r\nb\u202e" in str(error.value).replace("\\\\", "\\")
    assert str(error.value).isprintable()


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
    contents = inspect_file(tmp_path / "a.pt")
    (row,) = contents.weights
    assert (row.shape, row.dim, row.g, contents.others) == ((2, 2), 0, 1.5, 0)


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

EXAMPLES = {"max_examples": 60, "derandomize": True, "deadline": None, "database": None}


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
