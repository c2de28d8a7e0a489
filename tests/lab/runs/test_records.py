"""Records: round trips, partially written lines, damaged files, values that are not numbers."""

import json
import os
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightnorm.lab.errors import RecordError
from weightnorm.lab.records import (
    RunRecord,
    append_row,
    distinct_runs,
    find_records,
    load_record,
    read_rows,
    to_json,
    write_json,
    write_rows,
)

HEAD = {"experiment": "classify", "preset": "demo", "config": {"seed": 1}}


@pytest.fixture
def folder(tmp_path):
    """A run with three epochs."""
    return write_run(tmp_path)


def write_run(folder):
    write_json(folder / "config.json", HEAD)
    for epoch in (1, 2, 3):
        append_row(folder / "metrics.jsonl", {"epoch": epoch, "loss": 1 / epoch})
    return folder


def epochs(path):
    return [row["epoch"] for row in read_rows(path)]


def test_record_round_trip(folder):
    record = load_record(folder)
    assert (record.experiment, record.preset, record.config) == ("classify", "demo", {"seed": 1})
    assert record.column("loss") == [1, 1 / 2, 1 / 3]
    assert record.column("nothing") == [None] * 3
    assert not record.finished
    write_json(folder / "result.json", {"test_error": 0.1})
    record = load_record(folder)
    assert record.result == {"test_error": 0.1}
    assert (record.finished, record.diverged) == (True, None)
    assert (record.final("test_error"), record.final("nothing")) == (0.1, None)


def test_diverged_run_is_finished_without_a_number(folder):
    place = {"epoch": 2, "step": 7, "message": "diverged at epoch 2"}
    write_json(folder / "result.json", {"test_error": float("nan"), "diverged": place})
    record = load_record(folder)
    assert record.finished
    assert record.diverged == place
    assert record.result == {"test_error": None}
    assert record.final("test_error") is None


TORN = ('{"epoch": 9, "lo', "{", "\0\0\0", '"text"', "7", "\0\0{", "[[[[")


@pytest.mark.parametrize("torn", TORN)
def test_torn_line_loses_no_other_row(tmp_path, torn):
    rows = [{"epoch": 1}, {"epoch": 2}]
    for before in (0, 1, 2):
        path = tmp_path / f"{before}.jsonl"
        for row in rows[:before]:
            append_row(path, row)
        with path.open("a") as file:
            file.write(torn)  # as left by a kill or a power loss: without a line break
        for row in rows[before:]:
            append_row(path, row)
        assert read_rows(path) == rows


def test_zeros_before_a_row_do_not_hide_it(folder):
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"epoch": 2', b'\0\0\0\0{"epoch": 2'))
    assert epochs(path) == [1, 2, 3]


def test_write_rows_replaces_all_rows(folder):
    path = folder / "metrics.jsonl"
    write_rows(path, read_rows(path)[:2])
    assert epochs(path) == [1, 2]
    write_rows(path, [])
    assert path.read_bytes() == b""


def test_non_finite_numbers_are_null(folder):
    append_row(folder / "metrics.jsonl", {"epoch": 4, "loss": float("nan"), "all": [float("inf")]})
    line = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line) == {"epoch": 4, "loss": None, "all": [None]}


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999"])
def test_non_finite_numbers_are_read_as_none(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(f'{{"loss": {text}}}\n')
    assert read_rows(tmp_path / "x.jsonl") == [{"loss": None}]


class Colour(Enum):
    RED = "red"


def test_paths_and_enums_become_strings():
    assert to_json({"a": Path("x/y"), "b": Colour.RED}) == '{"a": "x/y", "b": "red"}'
    assert to_json({"x": np.float64(0.5)}) == '{"x": 0.5}'  # a subclass of float


@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.5), torch.ones(2), np.float32(0.5), np.ones(2), object(), {1}, 1j, b"x"],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_errors_and_nothing_is_written(folder, value):
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(TypeError, match=r"a record holds numbers and text, got"):
        append_row(folder / "metrics.jsonl", {"loss": value})
    with pytest.raises(TypeError, match=r"a record holds numbers and text, got"):
        write_json(folder / "config.json", {"deep": [value]})
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert load_record(folder).config == HEAD["config"]
    assert sorted(os.listdir(folder)) == ["config.json", "metrics.jsonl"]


def test_damaged_files_are_named(folder):
    (folder / "bad").mkdir()
    (folder / "bad" / "config.json").write_text("{")
    (folder / "strange").mkdir()
    write_json(folder / "strange" / "config.json", {"name": "something else"})
    records, problems = find_records(folder)
    assert [record.folder for record in records] == [folder]
    assert "bad/config.json is damaged" in problems[0]
    assert "strange/config.json is not a run's config" in problems[1]
    for content, message in (
        ("[]", r"result.json is not a run's result"),
        ('{"diverged": 3}', r"result.json is not a run's result"),
        ("[", r"result.json is damaged"),
        ("[" * 100_000, r"result.json is damaged: maximum recursion"),
    ):
        (folder / "result.json").write_text(content)
        with pytest.raises(RecordError, match=message):
            load_record(folder)
    with pytest.raises(RecordError, match="missing"):
        load_record(folder / "nowhere")


def test_folder_in_place_of_a_file_is_reported(folder):
    (folder / "sessions.jsonl").mkdir()
    with pytest.raises(RecordError, match=r"sessions.jsonl cannot be read: Is a directory"):
        load_record(folder)


FILES = ("config.json", "metrics.jsonl", "sessions.jsonl", "result.json")
damage = st.tuples(
    st.sampled_from(FILES),
    st.sampled_from(["flip", "cut", "insert", "append"]),
    st.floats(0, 1, exclude_max=True),
    st.binary(min_size=1, max_size=8) | st.sampled_from([b"\0" * 512, b"[" * 5000, b'\n{"a":1}\n']),
)


@settings(max_examples=100)
@given(st.lists(damage, min_size=1, max_size=4))
def test_damaged_records_are_read_or_refused(tmp_path_factory, damages):
    """Any damage is a RecordError or a record of the right types, never another exception."""
    folder = write_run(tmp_path_factory.mktemp("run"))
    append_row(folder / "sessions.jsonl", {"commit": "abc", "threads": 2})
    write_json(folder / "result.json", {"test_error": 0.25, "seconds": 3.5})
    for name, how, where, content in damages:
        path = folder / name
        data = bytearray(path.read_bytes())
        at = int(where * len(data))
        if how == "flip" and data:
            data[at] ^= content[0] or 1
        elif how == "cut":
            del data[at:]
        else:
            at = len(data) if how == "append" else at
            data[at:at] = content
        path.write_bytes(data)
    records, problems = find_records(folder)
    assert len(records) + len(problems) == 1
    for record in records:
        assert isinstance(record.config, dict)
        assert all(isinstance(row, dict) for row in record.metrics + record.sessions)
        assert isinstance(record.result, dict | None)
        assert record.final("test_error") is None or abs(record.final("test_error")) >= 0
        to_json(vars(record))  # all of it is valid JSON
        append_row(folder / "metrics.jsonl", {"epoch": 4})
        assert read_rows(folder / "metrics.jsonl") == [*record.metrics, {"epoch": 4}]
    assert all(str(folder) in problem and "\n" not in problem for problem in problems)


def test_runs_that_chose_a_learning_rate_are_no_results():
    results = Path(__file__).parents[3] / "docs" / "results" / "classify"
    grid, problems = find_records(results / "grid")
    assert problems == []
    assert {record.config["seed"] for record in grid} == {11}
    assert len(grid) == 15  # five parameterizations, three rates
    assert not {r.folder for r in find_records(results)[0]} & {r.folder for r in grid}


def test_copies_of_a_run_count_once():
    def run(name, machine="A", result=None, **config):
        return RunRecord(Path(name), "classify", "cpu", config, [{"machine": machine}], [], result)

    first, unfinished = run("b", seed=1, result={"error": 1.0}), run("a", seed=1)
    elsewhere = run("c", machine="B", seed=1, result={"error": 1.0})
    other = run("d", seed=2)
    kept, copies = distinct_runs([unfinished, first, elsewhere, other])
    assert kept == [first, other]
    assert copies == [(elsewhere, first), (unfinished, first)]
    benchmarks = [run("e", width=1), run("f", machine="B", width=1)]  # no seed: measurements
    assert distinct_runs(benchmarks) == (benchmarks, [])
