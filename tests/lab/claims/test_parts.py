"""Parts of a claim are computed once; results of other code or settings are never returned."""

import os
from pathlib import Path

import pytest

from weightnorm.lab.claims import claim
from weightnorm.lab.claims.claim import Context, code_digest
from weightnorm.lab.records import read_rows


def touch(context, folder, x):
    """Leave a file named by the argument and the process; 7 raises."""
    (Path(folder) / f"{x}-{os.getpid()}").touch()
    if x == 7:
        raise ValueError("seven")
    return {"x": x, "quick": context.quick}


def touched(folder):
    """Arguments with which `touch` was called since the last look."""
    paths = [*folder.iterdir()]
    for path in paths:
        path.unlink()
    return sorted(path.name.split("-")[0] for path in paths)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_progress_is_reported(tmp_path, workers):
    progress = []
    context = Context(workers=workers, on_progress=lambda *row: progress.append(row))
    found = context.map(touch, [(str(tmp_path), x) for x in (3, 1, 2)])
    assert found == [{"x": x, "quick": True} for x in (3, 1, 2)]
    assert progress == [(done, 3) for done in range(4)]
    processes = {path.name.split("-")[1] for path in tmp_path.iterdir()}
    assert (str(os.getpid()) in processes) == (workers == 1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "touched").mkdir()
    return tmp_path / "touched"


def test_computed_parts_are_kept(tmp_path, folder):
    context = Context(parts_file=tmp_path / "parts.jsonl")
    context.parts_file.write_text('{}\n{"key": "damaged"}\n')
    parts = [(str(folder), x) for x in (1, 2, 7, 3)]
    with pytest.raises(ValueError, match="seven"):
        context.map(touch, parts)
    assert touched(folder) == ["1", "2", "7"]
    assert len(read_rows(context.parts_file)) == 2 + 2
    assert [row["x"] for row in context.map(touch, [parts[i] for i in (0, 1, 3)])] == [1, 2, 3]
    assert touched(folder) == ["3"]


def test_parts_of_other_code_or_settings_are_computed_again(tmp_path, folder, monkeypatch):
    parts = [(str(folder), 1)]
    context = Context(parts_file=tmp_path / "parts.jsonl")
    other = Context(quick=False, parts_file=context.parts_file)
    assert [x.map(touch, parts)[0]["quick"] for x in (context, other)] == [True, False]
    assert touched(folder) == ["1"]
    assert len(read_rows(context.parts_file)) == 2
    context.map(touch, parts)
    assert touched(folder) == []
    monkeypatch.setattr(claim, "code_digest", lambda: "edited")
    context.map(touch, parts)
    assert touched(folder) == ["1"]


def test_digest_of_the_code(tmp_path):
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "b.py"
    digests = set()
    for text in ("steps = 100", "steps = 200"):
        file.write_text(text)
        digests.add(code_digest.__wrapped__(tmp_path))
    file.rename(tmp_path / "b.py")
    digests.add(code_digest.__wrapped__(tmp_path))
    assert len(digests) == 3
