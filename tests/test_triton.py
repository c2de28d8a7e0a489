"""The kernels for accelerators on a CPU: in Triton's interpreter, and compiled for real targets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")  # Linux only

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from weightnorm._kernels import triton_kernels as kernels  # noqa: E402
from weightnorm._kernels import triton_step_kernels as steps  # noqa: E402

HERE = Path(__file__).parent
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FILES = ("triton_cases", "test_kernels", "test_optimizer_accelerator", "gpu_cases")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


def test_in_the_interpreter():
    """Run the tests of both forms on the path of an accelerator with the kernels themselves."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    files = [HERE / f"{name}.py" for name in FILES]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "triton_interpreter", *files),
            *("-k", "(not test_kernels or on_accelerator) and not launches"),
            *("-p", "no:cacheprovider"),
        ],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "WEIGHTNORM_TEST_DEVICE": "cpu",
            "PYTHONPATH": path,
        },
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100


def compiled(kernel, target, types, constants):
    """Compile a kernel for a target; return its binaries and texts."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, types["*"])
        for name in kernel.arg_names
    }
    chosen = {name: value for name, value in constants.items() if name in signature}
    return triton.compile(ASTSource(kernel, signature, chosen), target=target).asm


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


def module_form():
    """Every kernel of the module form with its types and constants."""
    integers = dict.fromkeys(("units", "after", "stride", "n"), "i32")
    for kernel in (kernels.compose_kernel, kernels.backward_kernel):
        for dtype in TYPES:
            types = {"*": f"*{TYPES[dtype]}", **integers, "NORM": "*fp32", "eps": "fp32"}
            for units, elements in ((1, 1024), (16, 32)):
                yield kernel, types, {"WIDE": tl.float32, "BU": units, "BE": elements}


def optimizer_form():
    """Every kernel of the optimizer form with its types and constants."""
    scalars = dict.fromkeys(("shortest", "eps", "tolerance", "tiny"), "fp32")
    types = {"*": "*fp32", "TABLE": "*i64", "UNIT": "*i32", "WAS_ZERO": "*i1", **scalars}
    for kernel in (steps.sums_kernel, steps.directions_kernel, steps.weights_kernel):
        for narrow in (tl.float32, tl.bfloat16):
            constants = {"WIDE": tl.float32, "NARROW_TYPE": narrow, "BE": 1024}
            yield kernel, types, {**constants, "LOG": False, "PROJECT": True, "GIVEN": False}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", [module_form, optimizer_form])
def test_compiles_without_spilling_registers(form, target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # or triton 3.9 warns
    for kernel, types, constants in form():
        asm = compiled(kernel, TARGETS[target], types, constants)
        assert asm["hsaco" if target == "gfx942" else "cubin"]
        assert spills(asm, tmp_path) == 0
