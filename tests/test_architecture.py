"""The plan of the house as a test: which room may enter which, and what each may bring along.

In the library a room is a file; in the lab, a folder or a file. Anything not in a table is not
allowed.
"""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "weightnorm"

LIBRARY = {
    # room: the rooms it may enter. Outside, every one may use torch and nothing else.
    "sharding": set(),
    "kernels": {"sharding"},
    "layers": set(),
    "collective": set(),
    "init_report": set(),
    "functional": {"kernels", "sharding"},
    "mechanism": {"sharding"},
    "sites": {"functional", "kernels", "mechanism", "sharding"},
    "folding": {"mechanism", "sharding", "sites"},
    "joining": {"kernels", "mechanism", "sharding", "sites"},
    "reparam": {"functional", "layers", "mechanism", "sharding", "sites"},
    "mean_only": {"collective", "kernels", "layers", "sharding"},
    "data_init": {
        "collective",
        "init_report",
        "kernels",
        "layers",
        "mean_only",
        "sharding",
        "sites",
    },
    "checkpoint": {"functional", "kernels", "sites"},
    "probes": {"folding", "functional", "layers", "sharding", "sites"},
    "monitor": {"probes", "sharding", "sites"},
    "linter": {"functional", "layers", "sites"},
    "diagnostics": {"linter", "monitor", "probes"},
    "held": {"functional", "kernels", "sharding"},
    "optimizer": {"functional", "held", "layers"},
    "variants": {"collective", "mean_only", "reparam"},
}

LAB = {
    # room: (rooms of the lab it may enter, whether it uses the library, outside packages)
    "records": (set(), False, set()),
    "allocation": (set(), False, set()),
    "data": (set(), False, {"numpy", "torch", "pooch", "sklearn", "ale_py"}),
    "models": (set(), True, {"torch"}),
    "experiments": (
        {"allocation", "data", "models", "records"},
        True,
        {"numpy", "torch", "rich", "ray"},
    ),
    "claims": ({"allocation", "data", "experiments", "models", "records"}, True, {"torch", "rich"}),
    "benchmarks": (
        {"allocation", "data", "experiments", "models", "records"},
        True,
        {"torch", "rich", "numpy", "gymnasium"},
    ),
    "reports": ({"records"}, False, {"numpy", "matplotlib", "PIL", "jinja2"}),
    "safetensors_writer": (set(), False, {"torch"}),
    "checkpoint_files": ({"records", "safetensors_writer"}, True, {"torch", "safetensors"}),
    "parsing": ({"experiments"}, False, {"tyro", "rich"}),
    "benching": (
        {"allocation", "benchmarks", "experiments", "parsing", "records", "reports"},
        False,
        {"torch", "tyro", "rich"},
    ),
    "cli": (
        {
            "benching",
            "checkpoint_files",
            "claims",
            "data",
            "experiments",
            "parsing",
            "records",
            "reports",
        },
        True,
        {"tyro", "rich"},
    ),
}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(packages from outside, modules of weightnorm) that a file imports, at any depth."""
    outside, inside = set(), set()
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
                inside.add(rest)
            elif package not in sys.stdlib_module_names:
                outside.add(package)
    return outside, inside


FILES = {path.stem: path for path in SRC.glob("*.py") if not path.stem.startswith("__")}
LAB_FILES = {
    room: [SRC / "lab" / f"{room}.py"]
    if (SRC / "lab" / f"{room}.py").exists()
    else sorted((SRC / "lab" / room).rglob("*.py"))
    for room in LAB
}


def test_the_plan_names_every_room():
    assert set(FILES) == set(LIBRARY)
    planned = {path for files in LAB_FILES.values() for path in files}
    assert planned == set((SRC / "lab").rglob("*.py")) - {SRC / "lab" / "__init__.py"}


@pytest.mark.parametrize("room", LIBRARY)
def test_the_library_enters_only_what_the_plan_allows(room):
    outside, rooms = imports(FILES[room])
    assert outside <= {"torch"}
    assert rooms == LIBRARY[room]


@pytest.mark.parametrize("room", LAB)
def test_the_lab_enters_only_what_the_plan_allows(room):
    rooms, library, packages = LAB[room]
    for path in LAB_FILES[room]:
        outside, inside = imports(path)
        assert outside <= packages, f"{path.name} brings {outside - packages}"
        entered = {name.split(".")[1] for name in inside if name.startswith("lab.")} - {room}
        assert entered <= rooms, f"{path.name} enters {entered - rooms}"
        used = {name for name in inside if not name.startswith("lab")}
        assert library or not used, f"{path.name} uses the library: {used}"


def test_the_command_line_knows_only_the_lab():
    assert imports(SRC / "__main__.py") == (set(), {"lab.cli"})


def without_cycles(plan):
    done: set[str] = set()
    while len(done) < len(plan):
        free = {room for room, needs in plan.items() if room not in done and needs <= done}
        if not free:
            return False
        done |= free
    return True


def test_the_plan_has_no_cycles():
    assert without_cycles(LIBRARY)
    assert without_cycles({room: rooms for room, (rooms, _, _) in LAB.items()})
    assert not without_cycles({"a": {"b"}, "b": {"a"}})


def test_files_fit_a_readers_head():
    for path in SRC.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, path.name
