"""Checkpoint files that are damaged, made to harm, or random."""

import os
import pickle
import re
import tempfile
import zipfile
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

TERA = 10**12


@pytest.mark.parametrize("shape", [(TERA, 4), (TERA, 1), (2**61, 2)])
@pytest.mark.parametrize("key", ["w_v", "buffer", "w"])
def test_tensors_larger_than_their_file_are_refused(tmp_path, key, shape):
    for new_format in (True, False):
        path, claim = tmp_path / f"{new_format}.pt", torch.ones(1, 1).expand(shape)
        state = {"model": {key: claim, "w_g": torch.ones(())}}
        torch.save(state, path, _use_new_zipfile_serialization=new_format)
        assert path.stat().st_size < 2000
        with pytest.raises(FileError, match=rf"{path}: .* claims .* bytes"):
            inspect_file(path)
        with pytest.raises(FileError, match=rf"{path}: .* claims .* bytes"):
            convert_file(path, tmp_path / "out.pt", "hook", ("w",) if key == "w" else ())
    assert not (tmp_path / "out.pt").exists()


def test_deeply_nested_pickles_are_refused(tmp_path):
    depth, path = 100_000, tmp_path / "deep.pt"
    nested = b"\x80\x02" + b"}X\x01\x00\x00\x00a" * depth + b"}" + b"s" * depth + b"."
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, nested if name.endswith("data.pkl") else content)
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
