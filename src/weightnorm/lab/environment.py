"""The process that a run, a claim or a benchmark is computed in: ranks, device, settings, versions.

Note [import torch.distributed.nn early]
    A process group that still exists when the interpreter exits aborts the process from one of its
    threads, and `destroy_process_group` does not free a group that something else refers to. The
    functions of torch.distributed.nn take the group that exists when they are imported (by the
    first optimizer step, through torch._dynamo) as a default argument. Imported here, before any
    group exists, they refer to none.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # see Note [import torch.distributed.nn early]
from torch import Tensor, nn

from weightnorm.lab.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# — settings that decide the speed of a CPU —


def prepare_process(threads: int | None = None) -> dict[str, Any]:
    """Set what decides the speed of a CPU, and return it for the record.

    To be called before the first operation: torch's threads take over the setting for denormal
    numbers when they start.

    - Tails of activations underflow, and a CPU takes a hundred times as long for numbers below the
      smallest normal one, a tenth of a step of the language model: they become 0.
    - glibc returns large blocks to the system as soon as they are freed, and the next step's
      activations are mapped again page by page, a fifth to a third of a step: they are kept.
    - torch's number of threads, if `threads` is given.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    return {
        "threads": torch.get_num_threads(),
        "flush_denormal": torch.set_flush_denormal(True),
        "keeps_freed_memory": keep_freed_memory(),
    }


def flushes_denormals() -> bool:
    """Whether numbers below the smallest normal one are 0 in this thread."""
    return sys.float_info.min / 2 == 0


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory. False where the C library is not glibc."""
    # M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h.
    settings = {-4: 0, -1: 2**31 - 1, -2: 2**28}
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS and musl; no handle; Windows
        return False
    return all(mallopt(option, value) for option, value in settings.items())


# — device and ranks —


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is the fastest one available.

    Raises ConfigError if this machine does not have it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type != "cpu":
            torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises many kinds, depending on the backend
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise ConfigError(
            f"device is {name}; expected a device of this machine, such as cpu, or auto ({reason})"
        ) from None
    return device


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's random number generators on the CPU and on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned; on another type of device, the CPU's alone."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Return the argument that selects a device; mps has only one and takes none."""
    return () if device.type == "mps" else (device,)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the autocast context of a data type, such as bfloat16; none for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


def is_collective(error: BaseException | None) -> bool:
    """Return whether a collective of torch.distributed raised this error."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    names = [frame.f_globals.get("__name__") for frame, _ in frames]
    return isinstance(error, RuntimeError) and dist.distributed_c10d.__name__ in names


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process. See `is_collective` for errors of collectives."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device, wait_seconds: float) -> Ranks:
        """Join torchrun's process group, if there is one; `wait_seconds` is its timeout."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            if device.index is None:  # one GPU per rank of a machine
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=timedelta(seconds=wait_seconds))
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        """Destroy the process group."""
        if self.world > 1 or dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this rank writes the record."""
        return self.rank == 0

    @property
    def group(self) -> ProcessGroup | None:
        """The group for synchronized statistics; None in a single process."""
        return dist.group.WORLD if self.world > 1 else None

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's part of a global batch."""
        return rows.tensor_split(self.world)[self.rank] if self.world > 1 else rows

    def sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def any(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on any rank. One collective."""
        if self.world == 1:
            return list(flags)
        return [count > 0 for count in self.sum(torch.tensor(flags, dtype=torch.float32)).tolist()]

    def gather(self, value: Any = None) -> list[Any]:
        """Return the values of all ranks, on every rank. Without a value, wait for all ranks."""
        values: list[Any] = [value]
        if self.world > 1:
            values = [None] * self.world
            dist.all_gather_object(values, value)
        return values

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum every gradient over ranks, in one collective.

        Each rank's loss is its examples' share of the mean over the global batch, so the sum is
        the gradient of that mean even if ranks have batches of different sizes.
        """
        if self.world == 1:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = self.sum(torch.cat([grad.flatten() for grad in grads]))
        parts = total.split([grad.numel() for grad in grads])
        for parameter, grad, part in zip(parameters, grads, parts, strict=True):
            parameter.grad = grad.copy_(part.view_as(grad))


# — provenance —


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """Return a row for sessions.jsonl, with the settings of `prepare_process`."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "weightnorm": version("weightnorm"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": processor(),
        "device": device_name(device),
        **prepare_process(),
        "ranks": world,
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's product name, or else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor() -> str:
    """Return the processor's name if the system provides it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(file: Path = Path(__file__)) -> str | None:
    """Return the commit of the repository that `file` belongs to, with a ``+`` if src was changed.

    None if the package is installed elsewhere: git would name whatever repository surrounds it.
    """
    file = file.resolve()
    try:
        tracked = _git(file.parent, "ls-files", "--full-name", "--", file.name)
        if tracked != "src/weightnorm/lab/environment.py":
            return None
        head = _git(file.parent, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(file.parent, "status", "--porcelain", "--", ":/src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str:
    # Without variables such as GIT_DIR, which a git hook sets to another repository.
    variables = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        env=variables,
    )
    return done.stdout.strip()
