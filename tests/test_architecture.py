"""Allowed imports between modules. Anything not listed here is not allowed.

The library imports torch and itself, never the lab. In the lab a unit is a folder or a file; each
lists the units and outside packages it may import.
"""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "weightnorm"

LIBRARY = {
    # module: the modules it imports. Outside packages: torch only.
    "arguments": set(),
    "torch_private": set(),
    "dtensor": set(),
    "kernels": {"dtensor", "torch_private"},
    "layers": {"torch_private"},
    "distributed": set(),
    "init_report": set(),
    "functional": {"dtensor", "kernels"},
    "parametrization": {"dtensor", "functional", "kernels", "layers"},
    "inspection": {
        "arguments",
        "dtensor",
        "functional",
        "layers",
        "parametrization",
        "torch_private",
    },
    "folding": {"arguments", "dtensor", "inspection", "parametrization"},
    "batching": {"arguments", "dtensor", "inspection", "kernels", "parametrization"},
    "reparam": {
        "arguments",
        "dtensor",
        "folding",
        "functional",
        "inspection",
        "kernels",
        "layers",
        "parametrization",
    },
    "output_sums": {"kernels", "layers"},
    "mean_only": {
        "arguments",
        "distributed",
        "dtensor",
        "kernels",
        "layers",
        "output_sums",
        "torch_private",
    },
    "data_init": {
        "arguments",
        "distributed",
        "dtensor",
        "folding",
        "init_report",
        "inspection",
        "kernels",
        "layers",
        "mean_only",
        "torch_private",
    },
    "robust_init": {
        "arguments",
        "data_init",
        "dtensor",
        "folding",
        "functional",
        "inspection",
        "kernels",
        "layers",
        "mean_only",
        "torch_private",
    },
    "state_dicts": {"arguments", "folding", "dtensor", "functional", "inspection", "kernels"},
    "diagnostics.probes": {"dtensor", "folding", "functional", "inspection", "kernels", "layers"},
    "diagnostics.monitor": {
        "arguments",
        "diagnostics.probes",
        "dtensor",
        "functional",
        "inspection",
        "optimizer",
    },
    "diagnostics.linter": {
        "arguments",
        "dtensor",
        "functional",
        "in_place",
        "inspection",
        "layers",
        "optimizer",
        "parametrization",
    },
    "diagnostics": {"diagnostics.linter", "diagnostics.monitor", "diagnostics.probes"},
    "in_place": {"dtensor", "functional", "kernels"},
    "units": {"dtensor", "in_place", "kernels", "torch_private"},
    "optimizer_state": {"dtensor", "in_place"},
    "optimizer": {
        "arguments",
        "dtensor",
        "functional",
        "in_place",
        "layers",
        "optimizer_state",
        "units",
    },
    "parameterizations": {"arguments", "distributed", "mean_only", "reparam"},
}

LAB = {
    # unit: (units of the lab it may import, whether it uses the library, outside packages)
    "errors": (set(), False, set()),
    "files": ({"errors"}, False, set()),
    "malloc": (set(), False, set()),
    "data": ({"errors", "files"}, False, {"numpy", "torch", "pooch", "sklearn"}),
    "models": (set(), True, {"torch"}),
    "runs": ({"errors", "files", "malloc"}, True, {"numpy", "torch", "rich"}),
    "rl": ({"errors", "runs"}, True, {"numpy", "torch", "ale_py"}),
    "experiments": ({"data", "errors", "models", "rl", "runs"}, True, {"torch", "rich"}),
    "sweeps": ({"errors", "experiments", "runs"}, True, {"rich", "ray"}),
    "statistics": (set(), False, {"numpy", "scipy"}),
    "interleaved": (set(), False, {"torch"}),
    "pool": ({"errors"}, False, {"torch"}),
    "claims": (
        {
            "data",
            "errors",
            "experiments",
            "files",
            "interleaved",
            "malloc",
            "models",
            "pool",
            "rl",
            "runs",
            "statistics",
        },
        True,
        {"torch", "rich"},
    ),
    "benchmarks": (
        {
            "data",
            "errors",
            "experiments",
            "files",
            "interleaved",
            "malloc",
            "models",
            "pool",
            "rl",
            "runs",
            "statistics",
        },
        True,
        {"torch", "rich", "numpy", "scipy", "gymnasium"},
    ),
    "reports": (
        {"errors", "files", "runs", "statistics"},
        False,
        {"numpy", "matplotlib", "PIL", "jinja2"},
    ),
    "safetensors_writer": ({"files"}, False, {"torch"}),
    "checkpoint_files": (
        {"errors", "files", "safetensors_writer"},
        True,
        {"torch", "safetensors"},
    ),
    "cli": (
        {
            "benchmarks",
            "checkpoint_files",
            "claims",
            "data",
            "errors",
            "experiments",
            "files",
            "malloc",
            "reports",
            "runs",
            "sweeps",
        },
        True,
        {"torch", "tyro", "rich"},
    ),
}
RECORDS_ONLY = ("reports",)
"""Units that may import nothing of `runs` but records and selection, which do not need torch."""


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(outside packages, modules of weightnorm) that a file imports, at any depth."""
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


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    name: path
    for path in SRC.rglob("*.py")
    if (name := module_name(path)) and not name.startswith(("lab", "__"))
}
LAB_FILES = {
    unit: [SRC / "lab" / f"{unit}.py"]
    if (SRC / "lab" / f"{unit}.py").exists()
    else sorted((SRC / "lab" / unit).rglob("*.py"))
    for unit in LAB
}


def test_every_module_is_listed():
    assert set(FILES) == set(LIBRARY)
    listed = {path for files in LAB_FILES.values() for path in files}
    assert listed == set((SRC / "lab").rglob("*.py")) - {SRC / "lab" / "__init__.py"}


@pytest.mark.parametrize("module", LIBRARY)
def test_library_imports(module):
    outside, inside = imports(FILES[module])
    assert outside <= {"torch"}
    assert inside == LIBRARY[module]


@pytest.mark.parametrize("unit", LAB)
def test_lab_imports(unit):
    allowed, library, packages = LAB[unit]
    for path in LAB_FILES[unit]:
        outside, inside = imports(path)
        assert outside <= packages, f"{path.name} imports {outside - packages}"
        units = {name.split(".")[1] for name in inside if name.startswith("lab.")} - {unit}
        assert units <= allowed, f"{path.name} imports {units - allowed}"
        if unit in RECORDS_ONLY:
            runs = {name for name in inside if name.startswith("lab.runs")}
            assert runs <= {"lab.runs.records", "lab.runs.selection"}, f"{path.name} imports {runs}"
        used = {name for name in inside if not name.startswith("lab")}
        assert library or not used, f"{path.name} imports the library: {used}"


def test_main_imports_only_the_command_line():
    assert imports(SRC / "__main__.py") == ({"torch"}, {"lab.cli.main", "lab.errors"})


def without_cycles(graph):
    done: set[str] = set()
    while len(done) < len(graph):
        free = {module for module, needs in graph.items() if module not in done and needs <= done}
        if not free:
            return False
        done |= free
    return True


def test_no_import_cycles():
    assert without_cycles(LIBRARY)
    assert without_cycles({unit: units for unit, (units, _, _) in LAB.items()})
    assert not without_cycles({"a": {"b"}, "b": {"a"}})


def test_class_names_are_unique():
    """One concept, one name. Every experiment has a Config: that is their common interface."""
    found: dict[str, list[str]] = {}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not (
                node.name == "Config" and path.parent.name == "experiments"
            ):
                found.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
