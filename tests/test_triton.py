"""The kernels for accelerators on a CPU: in Triton's interpreter, and compiled for real targets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weightnorm.lab.bench import kernels

pytest.importorskip("triton", minversion="3.9")  # Linux only; torch 2.9 comes with 3.5

HERE = Path(__file__).parent
FILES = ("triton_cases", "test_kernels", "test_optimizer_accelerator", "gpu_cases")


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


@pytest.mark.parametrize("target", kernels.TARGETS)
@pytest.mark.parametrize("form", [kernels.module_form, kernels.optimizer_form])
def test_compiles_without_spilling_registers(form, target):
    for kernel, types, constants in form():
        asm = kernels.compiled(kernel, target, types, constants)
        assert asm["hsaco" if target == "gfx942" else "cubin"]
        registers, spills = kernels.registers_and_spills(asm)
        assert 0 < registers <= 128
        assert spills == 0


def test_passes_over_a_weight_are_counted():
    counts = {kernel.fn.__name__: kernels.passes(kernel) for kernel, *_ in kernels.module_form()}
    assert counts == {"compose_kernel": 3, "backward_kernel": 5}
    counts = {kernel.fn.__name__: kernels.passes(kernel) for kernel, *_ in kernels.optimizer_form()}
    assert counts == {"sums_kernel": 2, "directions_kernel": 6, "weights_kernel": 3}
