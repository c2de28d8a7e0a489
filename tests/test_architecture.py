"""The plan of the house as a test: which room may enter which, and what each may bring along.

A room is a file of the library. Anything not in the table is not allowed.
"""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "weightnorm"

ROOMS = {
    # room: the rooms it may enter
    "kernels": set(),
    "layers": set(),
    "collective": set(),
    "init_report": set(),
    "functional": {"kernels"},
    "mechanism": set(),
    "sites": {"functional", "kernels", "mechanism"},
    "folding": {"mechanism", "sites"},
    "reparam": {"functional", "layers", "mechanism", "sites"},
    "mean_only": {"collective", "kernels", "layers"},
    "data_init": {"collective", "init_report", "kernels", "layers", "mean_only", "sites"},
    "diagnostics": {"sites"},
    "variants": {"collective", "mean_only", "reparam"},
}
OUTSIDE = {"torch"}


def imports(path: Path):
    """(outside packages, rooms) that a file imports, at any depth."""
    outside, rooms = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names = [node.module]
            if node.module == "weightnorm":
                names = [f"weightnorm.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "weightnorm":
                rooms.add(rest)
            elif package not in sys.stdlib_module_names:
                outside.add(package)
    return outside, rooms


FILES = {path.stem: path for path in SRC.glob("*.py") if path.stem != "__init__"}


def test_the_plan_names_every_room():
    assert set(FILES) == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_enters_only_what_the_plan_allows(room):
    outside, rooms = imports(FILES[room])
    assert outside <= OUTSIDE
    assert rooms <= ROOMS[room], f"{room} enters {rooms - ROOMS[room]}"


def test_the_plan_is_no_wider_than_the_house():
    for room, allowed in ROOMS.items():
        assert imports(FILES[room])[1] == allowed, room


def test_the_plan_has_no_cycles():
    done: set[str] = set()
    while len(done) < len(ROOMS):
        free = {room for room, needs in ROOMS.items() if room not in done and needs <= done}
        assert free, f"cycle among {set(ROOMS) - done}"
        done |= free


def test_files_fit_a_readers_head():
    for path in SRC.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, path.name
