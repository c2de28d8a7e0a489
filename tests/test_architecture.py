"""Imports point inwards: a module imports only modules that stand before it in LAYERS.

A folder is one entry. The library imports torch alone, and never the lab.
"""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "weightnorm"

LAYERS = [
    "_torch_private", "_dtensor", "_units", "_kernels", "functional", "_weight_norm",
    "_parametrize",
    "inspection", "layers", "folding", "module_form", "_distributed", "init_report",
    "output_sums", "mean_only", "data_init", "robust_init", "checkpoints", "files",
    "parameterizations",
    "_in_place", "_device_units", "_optimizer_groups", "optimizer", "diagnostics",
    "lab.errors", "lab.files", "lab.weights", "lab.data", "lab.records", "lab.config",
    "lab.environment", "lab.progress", "lab.run", "lab.atari", "lab.replay_buffer",
    "lab.classify", "lab.vae_networks", "lab.vae", "lab.draw", "lab.dqn", "lab.language",
    "lab.statistics", "lab.results", "lab.executors", "lab.sweep", "lab.interleaved",
    "lab.pool",
    "lab.bench", "lab.claims", "lab.report", "lab.bench_output", "lab.cli",
]  # fmt: skip
OUTSIDE = {
    "library": {"torch"},
    "_kernels": {"torch", "triton"},
    "files": {"torch", "safetensors"},
    "lab": {
        "ale_py", "gymnasium", "jinja2", "matplotlib", "numpy", "pandas", "peft", "PIL", "pooch",
        "ray", "rich", "safetensors", "scipy", "sklearn", "stable_baselines3", "torch", "triton",
        "tyro",
    },
}  # fmt: skip


def entry(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "lab" else 1])


FILES = {
    entry(".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")): []
    for path in SRC.rglob("*.py")
}
for path in sorted(SRC.rglob("*.py")):
    name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    FILES[entry(name)].append(path)
for surface in ("__init__", "__main__", "lab"):  # they may import anything
    del FILES[surface]


def imports(path: Path) -> set[str]:
    """Modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            if node.module in ("weightnorm", "weightnorm.lab"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def test_every_module_has_a_layer():
    assert set(FILES) == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_inwards(layer):
    library = not layer.startswith("lab")
    for path in FILES[layer]:
        for name in imports(path):
            package, _, module = name.partition(".")
            if package != "weightnorm":
                group = layer if layer in OUTSIDE else "library" if library else "lab"
                allowed = OUTSIDE[group] | sys.stdlib_module_names
                assert package in allowed, f"{path.name} imports {package}"
            elif entry(module) in LAYERS:
                earlier = LAYERS[: LAYERS.index(layer) + 1]
                assert entry(module) in earlier, f"{path.name} imports {module}"
            else:  # a public name, which only the lab may take from the surface
                assert not library, f"{path.name} imports {name} from the surface"
