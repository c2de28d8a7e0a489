"""Run code on a pretended accelerator, to find mixed devices and reads of data without a GPU.

Under FakeTensorMode tensors have a shape, a data type and a device, and no data. Registered as a
Python backend, the device "pretend" is not a CPU for torch. On it

- an operation on tensors of different devices raises, as on CUDA;
- `.item()`, `float()`, `bool()`, boolean masks and other reads of data raise: on an accelerator the
  host would wait for the device;
- copies from the device to the CPU, and CPU indices into tensors on the device, which torch allows
  but which wait as well, raise `DeviceRead`.

Registering a backend affects the whole process, so cases run in a process of their own, one for all
cases of a test module:

    from pretended_device import DEVICE, failures

    def linear_step():                      # anything that creates its tensors on DEVICE
        layer = weight_norm(nn.Linear(3, 4, device=DEVICE))
        layer(torch.randn(5, 3, device=DEVICE)).sum().backward()

    CASES = {"linear": linear_step}         # name → function without arguments

    @pytest.fixture(scope="module")
    def found():
        return failures(__file__)           # runs every function of CASES

    @pytest.mark.parametrize("case", CASES)
    def test_neither_reads_nor_mixes_devices(case, found):
        assert found[case] == ""
"""

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
DEVICE = "pretend"
SETUP = "_setup_privateuseone_for_python_backend"


def failures(module: str | Path) -> dict[str, str]:
    """Run every case of a test module in a new process: name → error, empty if there was none."""
    if not hasattr(backend_registration, SETUP):
        pytest.skip("torch 2.9 cannot register a backend in Python")
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(here), str(module)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return errors


def main(path: str) -> None:
    """Run the cases of a module, and print the errors as JSON."""
    pretend()
    spec = importlib.util.spec_from_file_location("cases", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    print(json.dumps({name: error_of(case) for name, case in module.CASES.items()}))


def pretend() -> None:
    """Register the device, and make modules of fake tensors movable and copyable."""
    getattr(backend_registration, SETUP)(DEVICE)
    nn.Module._apply = assign_converted
    FakeTensorMode.__deepcopy__ = lambda self, memo: self


def assign_converted(module, fn, recurse=True):
    """`Module._apply` with new parameters: torch cannot change fake ones in place."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for key, p in module._parameters.items():
        if p is not None:
            module._parameters[key] = nn.Parameter(fn(p.detach()), p.requires_grad)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = fn(buffer)
    return module


def error_of(case) -> str:
    """Run one case; return its error and where it was raised, or an empty string."""
    with FakeTensorMode(), NoDeviceReads():
        try:
            case()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f for f in frames if "site-packages" not in f.filename]
            first_line = str(error).partition("\n")[0][:200]
            return f"{type(error).__name__}: {first_line}\n{''.join(traceback.format_list(ours))}"
    return ""


class DeviceRead(RuntimeError):
    """An operation for which the host waits for the device."""


class NoDeviceReads(TorchDispatchMode):
    """Raises `DeviceRead` on copies to the CPU, and on mixed devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func is aten._to_copy.default and getattr(args[0], "constant", None) is not None:
            # FakeTensorMode computes with the values of constants, which cannot be on the device.
            source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
            if (device := kwargs.get("device")) is not None and device.type == DEVICE:
                return torch.empty(source.shape, dtype=dtype, device=device)
        out = func(*args, **kwargs)
        on_device = any(x.device.type == DEVICE for x in inputs)
        mixed = on_device and any(x.device.type == "cpu" and x.dim() for x in inputs)
        if mixed and func is not aten.copy_.default:  # a copy to the device does not wait for it
            raise DeviceRead(f"{func} takes a tensor on the CPU and one on the device")
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if on_device and any(x.device.type == "cpu" for x in outputs):
            raise DeviceRead(f"{func} copies from the device to the CPU")
        return out


if __name__ == "__main__":
    main(sys.argv[1])
