"""PartRunner of a claim: computed once each, in this process or in workers."""

import os
from pathlib import Path

import pytest

from weightnorm.lab.claims.context import Context
from weightnorm.lab.claims.parts import PartRunner
from weightnorm.lab.claims.runner import latest_rows, measure
from weightnorm.lab.errors import RunError
from weightnorm.lab.files import lock_folder
from weightnorm.lab.records import append_row, read_rows

CONTEXT = Context(quick=True, seeds=(1, 2))


def touch(context, folder, x):
    """Leave a file named by the argument and the process; 7 raises."""
    (Path(folder) / f"{x}-{os.getpid()}").touch()
    if x == 7:
        raise ValueError("seven")
    return {"x": x, "quick": context.quick}


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_progress_is_reported(tmp_path, workers):
    progress = []
    parts = PartRunner(workers, on_progress=lambda *row: progress.append(row))
    found = parts.map(CONTEXT, touch, [(str(tmp_path), x) for x in (3, 1, 2)])
    assert found == [{"x": x, "quick": True} for x in (3, 1, 2)]
    assert progress == [(done, 3) for done in range(4)]
    processes = {path.name.split("-")[1] for path in tmp_path.iterdir()}
    assert (str(os.getpid()) in processes) == (workers == 1)


def test_stored_parts_are_not_computed_again(tmp_path):
    file, touched = tmp_path / "parts.jsonl", tmp_path / "touched"
    touched.mkdir()
    arguments = [(str(touched), x) for x in (1, 2, 7, 3)]
    with pytest.raises(ValueError, match="seven"):
        PartRunner(1, file).map(CONTEXT, touch, arguments)
    assert len(read_rows(file)) == 2
    for path in touched.iterdir():
        path.unlink()
    found = PartRunner(1, file).map(CONTEXT, touch, [part for part in arguments if part[1] != 7])
    assert [row["x"] for row in found] == [1, 2, 3]
    assert [path.name.split("-")[0] for path in touched.iterdir()] == ["3"]


def test_damaged_rows_are_computed_again(tmp_path):
    file = tmp_path / "parts.jsonl"
    file.write_text('{}\n{"part": "x"}\n')
    assert PartRunner(1, file).map(CONTEXT, touch, [(str(tmp_path), 1)])[0]["x"] == 1


def test_rows_without_a_claim_are_skipped_and_the_folder_is_locked(tmp_path):
    context = Context(quick=True, seeds=(1, 2), runs=tmp_path)
    folder = measure(context, only=[1])
    (row,) = latest_rows(folder).values()
    append_row(folder / "metrics.jsonl", {"number": 2})
    assert latest_rows(folder) == {1: row}
    with lock_folder(folder), pytest.raises(RunError, match="another process is running in"):
        measure(context, only=[1])


def test_functions_with_equal_arguments_have_their_own_results():
    parts = PartRunner()

    def double(context, x):
        return 2 * x

    def triple(context, x):
        return 3 * x

    assert [parts.map(CONTEXT, function, [(5,)]) for function in (double, triple)] == [[10], [15]]
