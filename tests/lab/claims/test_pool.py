"""Parts of a measurement: in order, none twice, by one process or several."""

import os
from pathlib import Path

import pytest

from weightnorm.lab.claims.context import Workbench
from weightnorm.lab.claims.pool import Crew
from weightnorm.lab.runs.records import read_rows

BENCH = Workbench(quick=True, seeds=(1, 2))


def noted(bench, folder, x):
    """Leaves a trace; 7 breaks."""
    (Path(folder) / f"{x}-{os.getpid()}").touch()
    if x == 7:
        raise ValueError("seven")
    return {"x": x, "quick": bench.quick}


def traces(folder):
    return sorted(path.name.split("-")[0] for path in folder.iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_come_in_order_and_are_counted(tmp_path, workers):
    told = []
    crew = Crew(workers, tell=lambda *row: told.append(row))
    try:
        found = crew.each(BENCH, noted, [(str(tmp_path), x) for x in (3, 1, 2)])
    finally:
        crew.close()
    assert found == [{"x": x, "quick": True} for x in (3, 1, 2)]
    assert told == [(done, 3) for done in range(4)]
    processes = {path.name.split("-")[1] for path in tmp_path.iterdir()}
    assert (str(os.getpid()) in processes) == (workers == 1)


def test_what_was_found_before_a_stop_is_not_measured_again(tmp_path):
    file, traced = tmp_path / "parts.jsonl", tmp_path / "traces"
    traced.mkdir()
    parts = [(str(traced), x) for x in (1, 2, 7, 3)]
    with pytest.raises(ValueError, match="seven"):
        Crew(1, file).each(BENCH, noted, parts)
    assert len(read_rows(file)) == 2
    for trace in traced.iterdir():
        trace.unlink()
    found = Crew(1, file).each(BENCH, noted, [part for part in parts if part[1] != 7])
    assert [row["x"] for row in found] == [1, 2, 3]
    assert traces(traced) == ["3"]
