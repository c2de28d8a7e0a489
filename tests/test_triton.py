"""The kernels for accelerators on a CPU: in Triton's interpreter, and compiled for real targets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")  # Linux only

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from weightnorm._kernels import triton_kernels as kernels  # noqa: E402

HERE = Path(__file__).parent
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


def test_in_the_interpreter():
    """Run every test of the kernels on the path of an accelerator, and triton_cases.py."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    files = [HERE / "triton_cases.py", HERE / "test_kernels.py"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "triton_interpreter", *files),
            *("-k", "triton_cases or on_accelerator", "-p", "no:cacheprovider"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100


def compiled(kernel, target, dtype, tile):
    """Compile a kernel for a target; return its binaries and texts."""
    integers = dict.fromkeys(("units", "after", "stride", "n"), "i32")
    constants = {"WIDE": triton.language.float32, "BU": tile[0], "BE": tile[1]}
    types = {
        **dict.fromkeys(kernel.arg_names, f"*{TYPES[dtype]}"),
        **dict.fromkeys(constants, "constexpr"),
        **integers,
        "NORM": "*fp32",
        "eps": "fp32",
    }
    signature = {name: types[name] for name in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constants), target=target).asm


def spills(asm, folder):
    """Bytes that a kernel moves between registers and memory, as the assembler reports them."""
    if "amdgcn" in asm:
        return int(re.search(r"vgpr_spill_count:\s+(\d+)", asm["amdgcn"])[1])
    (folder / "kernel.ptx").write_text(asm["ptx"])
    architecture = re.search(r"\.target (\w+)", asm["ptx"])[1]
    report = subprocess.run(
        [PTXAS, "-v", f"--gpu-name={architecture}", "kernel.ptx", "-o", "kernel.cubin"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", report)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["compose_kernel", "backward_kernel"])
def test_compiles_without_spilling_registers(kernel, target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # or triton 3.9 warns
    for dtype in TYPES:
        for tile in [(1, 1024), (16, 32)]:
            asm = compiled(getattr(kernels, kernel), TARGETS[target], dtype, tile)
            assert asm["hsaco" if target == "gfx942" else "cubin"]
            assert spills(asm, tmp_path) == 0
