"""Unpickling builds arrays, lists, numbers and bytes, and refuses anything else."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from weightnorm.lab.data import safe_pickle
from weightnorm.lab.errors import DataError


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def read(content: bytes) -> dict[bytes, Any]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "batch")
        path.write_bytes(content)
        return safe_pickle.read(path)


@given(
    array=npst.arrays(np.uint8, npst.array_shapes(min_dims=0, max_dims=3, min_side=0)),
    labels=st.lists(st.integers(-(2**40), 2**40)),
    names=st.lists(st.binary()),
    protocol=st.sampled_from([3, 4]),
)
def test_round_trip(
    array: np.ndarray, labels: list[int], names: list[bytes], protocol: int
) -> None:
    got = read(pickle.dumps({b"data": array, b"labels": labels, b"names": names}, protocol))
    np.testing.assert_array_equal(got.pop(b"data"), array)
    assert got == {b"labels": labels, b"names": names}


def test_python_2_pickle_is_read() -> None:
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01bt R"
        b"(K\x01K\x02K\x02\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x04\x07\x08\x09\x0atb"
    ).replace(b" ", b"")
    got = read(b"\x80\x02}U\x04data" + array + b"s.")
    np.testing.assert_array_equal(got[b"data"], np.array([[7, 8], [9, 10]], np.uint8))


@pytest.mark.parametrize("function", [os.mkdir, exec], ids=["os", "builtins"])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_malicious_pickle_is_not_executed(tmp_path: Path, function: Any, protocol: int) -> None:
    trace = tmp_path / "trace"
    argument = str(trace) if function is os.mkdir else f"import os; os.mkdir({str(trace)!r})"
    content = pickle.dumps({"data": Call(function, argument)}, protocol)
    with pytest.raises(DataError, match=r"refused: it refers to \w+\.(mkdir|exec)"):
        read(content)
    assert not trace.exists()
    pickle.loads(content)  # It would have done it.
    assert trace.exists()


def test_array_of_forged_pointers_is_refused() -> None:
    content = pickle.dumps({b"data": Call(np.ndarray, (1,), np.dtype("O"), b"\x41" * 8)}, 3)
    with pytest.raises(DataError, match="dtype 'O8'"):
        read(content)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, np.float32),
        np.zeros(3, np.int8),
        np.array([None]),
        np.zeros((2, 3), np.uint8, order="F"),
        np.ma.zeros(3, np.uint8),
        np.uint8(3),
        Path("x"),
        set,
        len,
    ],
    ids=repr,
)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(DataError, match="refused"):
        read(pickle.dumps({b"data": value}, 3))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        pickle.dumps([1, 2], 3),
        pickle.dumps({b"data": np.zeros(99, np.uint8)}, 3)[:-40],
        b"\x80\x03}C\x04datacnumpy\nndarray\n)Rs.",  # An array without content.
        b"\x80\x03cnumpy\nndarray\n}b.",  # State for the class itself.
        b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.",  # A dotted path.
    ],
    ids=["empty", "text", "list", "truncated", "hollow", "class", "dotted"],
)
def test_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="refused"):
        read(content)
