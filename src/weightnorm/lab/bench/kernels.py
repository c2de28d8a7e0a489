"""The Triton kernels, compiled on a machine without a GPU: registers, spills, and traffic.

Registers are those that the assembler reports for each target. Traffic is counted in the source of
the kernels, in passes over the weight: every load and store in a loop over the elements of a unit.
The second read of a unit comes from cache where the unit fits into it. Needs triton.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, at_most
from weightnorm.lab.bench.peers import OURS
from weightnorm.lab.errors import RunError

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what GPUs do; triton 3.9 warns without it

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
MINIMUM = "minimum"
LEAST = {"compose_kernel": 2, "backward_kernel": 3, "directions_kernel": 4, "weights_kernel": 2}
"""Passes if every tensor were read and written once: v, w; ∇w, v, ∇v; w, ∇w, v, ∇v; v, w."""


def module_form() -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Yield every kernel of the module form with the types and constants it is compiled for."""
    import triton.language as tl

    from weightnorm._kernels import triton_kernels as kernels

    integers = dict.fromkeys(("units", "after", "stride", "n"), "i32")
    for kernel in (kernels.compose_kernel, kernels.backward_kernel):
        for dtype in ("fp32", "bf16", "fp16"):
            types = {"*": f"*{dtype}", **integers, "NORM": "*fp32", "eps": "fp32"}
            for units, elements in ((1, 1024), (16, 32)):
                yield kernel, types, {"WIDE": tl.float32, "BU": units, "BE": elements}


def optimizer_form() -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Yield every kernel of the optimizer form likewise."""
    import triton.language as tl

    from weightnorm._kernels import triton_step_kernels as kernels

    scalars = dict.fromkeys(("shortest", "eps", "tolerance", "tiny"), "fp32")
    types = {"*": "*fp32", "TABLE": "*i64", "UNIT": "*i32", "WAS_ZERO": "*i1", **scalars}
    for kernel in (kernels.sums_kernel, kernels.directions_kernel, kernels.weights_kernel):
        for narrow in (tl.float32, tl.bfloat16):
            constants = {"WIDE": tl.float32, "NARROW_TYPE": narrow, "BE": 1024}
            yield kernel, types, {**constants, "LOG": False, "PROJECT": True, "GIVEN": False}


def compiled(kernel: Any, target: str, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """Compile a kernel for a target; return its binaries and texts by kind."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else types.get(name, types["*"])
        for name in kernel.arg_names
    }
    chosen = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, chosen)
    return triton.compile(source, target=GPUTarget(*TARGETS[target])).asm


def registers_and_spills(asm: Any) -> tuple[int, int]:
    """Return registers per thread, and how many bytes (AMD: registers) spill to memory."""
    if "amdgcn" in asm:
        found = (re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"]) for name in _AMD)
        registers, spills = (int(match[1]) for match in found if match)
        return registers, spills
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    target = re.search(r"\.target (\w+)", asm["ptx"])
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(asm["ptx"])
        report = subprocess.run(
            [ptxas, "-v", f"--gpu-name={target[1]}", "kernel.ptx", "-o", "kernel.cubin"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    used = re.search(r"Used (\d+) registers", report)
    assert used is not None
    return int(used[1]), sum(map(int, re.findall(r"(\d+) bytes spill", report)))


_AMD = ("vgpr_count", "vgpr_spill_count")


def passes(kernel: Any) -> int:
    """Count the loads and stores of a kernel in loops over the elements of a unit.

    Those of functions that it calls are included; branches for bfloat16 weights are not.
    """
    return _passes(kernel, in_loop=False)


def _passes(kernel: Any, *, in_loop: bool) -> int:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    helpers = {n: f for n, f in kernel.fn.__globals__.items() if n in ("_read", "_sums")}

    def count(node: ast.AST, looped: bool) -> int:
        if isinstance(node, ast.If) and "NARROW" in ast.unparse(node.test):
            return 0
        found = 0
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += looped and called in ("tl.load", "tl.store")
            if called in helpers:
                found += _passes(helpers[called], in_loop=looped)
        looped = looped or isinstance(node, ast.For)
        return found + sum(count(child, looped) for child in ast.iter_child_nodes(node))

    return count(tree, in_loop)


def cases(settings: Settings) -> Iterator[Case]:
    found = [*module_form(), *optimizer_form()]
    widest = {kernel.fn.__name__: (kernel, *rest) for kernel, *rest in reversed(found)}
    for name, (kernel, types, constants) in reversed(widest.items()):
        peers = {
            target: partial(_registers, kernel, target, types, constants) for target in TARGETS
        }
        yield Case(f"{name}: registers per thread", peers, "sm_80", (), unit="registers", rounds=1)
    for name, least in LEAST.items():
        kernel = widest[name][0]
        counts = {
            MINIMUM: partial(float, least),
            OURS: partial(_passes_of, kernel),
        }
        limit = at_most(OURS, 1.67, MINIMUM)
        yield Case(
            f"{name}: passes over the weight", counts, MINIMUM, (limit,), unit="passes", rounds=1
        )


def _passes_of(kernel: Any) -> float:
    return float(passes(kernel))


def _registers(kernel: Any, target: str, types: dict[str, str], constants: dict[str, Any]) -> float:
    registers, spills = registers_and_spills(compiled(kernel, target, types, constants))
    if spills:
        raise RunError(f"{kernel.fn.__name__} spills registers on {target}: {spills}")
    return float(registers)


BENCHMARK = Benchmark("kernels", "Triton kernels, compiled without a GPU", cases)
