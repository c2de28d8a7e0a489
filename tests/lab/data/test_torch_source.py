import math

import pytest
import torch

from weightnorm.lab.data import torch_source
from weightnorm.lab.data.torch_source import Corpus, is_held_out, load, trigram_bits_per_byte
from weightnorm.lab.errors import DataError


def test_the_installed_package():
    corpus = load()
    assert corpus.version == torch.__version__
    total = len(corpus.train) + len(corpus.test)
    assert total > 10_000_000
    assert 0.03 < len(corpus.test) / total < 0.2
    text = bytes(corpus.train[:100_000].tolist())
    assert b"import" in text
    assert load().digest == corpus.digest


def make(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_files_are_sorted_and_split_by_path(tmp_path):
    names = [f"{folder}/file{i}.py" for folder in ("b", "a") for i in range(20)]
    make(tmp_path, names)
    (tmp_path / "note.txt").write_text("no source")
    corpus = load(tmp_path)
    parts = {False: "", True: ""}
    for name in sorted(names):
        parts[is_held_out(name)] += f"# {name}\n"
    assert bytes(corpus.train.tolist()).decode() == parts[False]
    assert bytes(corpus.test.tolist()).decode() == parts[True]
    assert parts[True]
    (tmp_path / "a" / "file3.py").write_text("changed")
    assert load(tmp_path).digest != corpus.digest


def test_without_sources(tmp_path):
    with pytest.raises(DataError, match=r"found 0 Python files .* install torch from a wheel"):
        load(tmp_path)


def corpus_of(train, test):
    return Corpus(torch_source._tensor(train), torch_source._tensor(test), "", "")


def test_trigram_model_against_a_direct_computation():
    train, test = b"abracadabra abracadabra bar", b"abra cab barz"

    def probability(context, byte):
        if context is None:
            return 1 / 256
        follow = [train[i + len(context)] for i in range(len(train) - len(context))
                  if train[i : i + len(context)] == context]  # fmt: skip
        shorter = probability(context[1:] if context else None, byte)
        kinds = len(set(follow))
        if not follow:
            return shorter
        return (follow.count(byte) + kinds * shorter) / (len(follow) + kinds)

    bits = [-math.log2(probability(test[i : i + 2], test[i + 2])) for i in range(len(test) - 2)]
    expected = sum(bits) / len(bits)
    assert trigram_bits_per_byte(corpus_of(train, test)) == pytest.approx(expected)


def test_trigram_model_of_text_it_has_seen():
    text = b"the same line again and again\n" * 50
    assert trigram_bits_per_byte(corpus_of(text, text)) < 1
    assert trigram_bits_per_byte(corpus_of(text, b"\x00\x01\x02\x03")) > 7
