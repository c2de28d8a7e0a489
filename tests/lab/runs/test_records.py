"""Records survive half-written lines, damage and numbers that are not numbers."""

import json

import pytest

from weightnorm.lab.errors import RecordError
from weightnorm.lab.runs.records import (
    append_row,
    find_records,
    keep_rows,
    load_record,
    read_rows,
    write_json,
)

HEAD = {"experiment": "classify", "preset": "demo", "config": {"seed": 1}}


@pytest.fixture
def folder(tmp_path):
    write_json(tmp_path / "config.json", HEAD)
    for epoch in (1, 2, 3):
        append_row(tmp_path / "metrics.jsonl", {"epoch": epoch, "loss": 1 / epoch})
    return tmp_path


def test_a_run_reads_back(folder):
    record = load_record(folder)
    assert (record.experiment, record.preset, record.config) == ("classify", "demo", {"seed": 1})
    assert record.column("loss") == [1, 1 / 2, 1 / 3]
    assert record.column("nothing") == [None] * 3
    assert not record.finished
    write_json(folder / "result.json", {"test_error": 0.1})
    assert load_record(folder).result == {"test_error": 0.1}


@pytest.mark.parametrize("cut", ['{"epoch": 4, "lo', "{", "\x00\x00", '"text"', "7"])
def test_what_is_no_row_is_dropped(folder, cut):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(cut)
    assert [row["epoch"] for row in load_record(folder).metrics] == [1, 2, 3]


def test_a_row_after_a_cut_one_is_still_read(folder):
    text = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([text[0], text[1][:5], text[2]]))
    assert [row["epoch"] for row in read_rows(folder / "metrics.jsonl")] == [1, 3]


def test_going_back(folder):
    keep_rows(folder / "metrics.jsonl", 2)
    assert [row["epoch"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2]
    with pytest.raises(RecordError, match="2 rows, but the checkpoint was made after 3"):
        keep_rows(folder / "metrics.jsonl", 3)


def test_numbers_that_are_not_finite_are_null(folder):
    append_row(folder / "metrics.jsonl", {"epoch": 4, "loss": float("nan"), "all": [float("inf")]})
    line = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line) == {"epoch": 4, "loss": None, "all": [None]}


def test_damaged_files_are_named(folder):
    (folder / "bad").mkdir()
    (folder / "bad" / "config.json").write_text("{")
    (folder / "strange").mkdir()
    write_json(folder / "strange" / "config.json", {"name": "something else"})
    records, problems = find_records(folder)
    assert [record.folder for record in records] == [folder]
    assert "bad/config.json is damaged" in problems[0]
    assert "strange/config.json is not a run's config" in problems[1]
    (folder / "result.json").write_text("[]")
    with pytest.raises(RecordError, match=r"result.json is not a run's result"):
        load_record(folder)
    (folder / "result.json").write_text("[")
    with pytest.raises(RecordError, match=r"result.json is damaged"):
        load_record(folder)
    with pytest.raises(RecordError, match="missing"):
        load_record(folder / "nowhere")


def test_an_atomic_write_leaves_the_old_file_or_the_new(folder, monkeypatch):
    import os

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(folder / "config.json", {"new": 1})
    assert json.loads((folder / "config.json").read_text()) == HEAD
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "metrics.jsonl"]
