"""Count the kernels that a computation would launch on an accelerator.

Runs on the CPU, on the path that the library takes on an accelerator. Every operation that reaches
the backend counts as one launch, except those that only make views or allocate memory. The counts
are deterministic, so tests can hold them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from weightnorm._kernels import assume_accelerator
from weightnorm._torch_private import TorchDispatchMode

_NO_LAUNCH = {
    "_unsafe_view",
    "_local_scalar_dense",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


class LaunchCounter(TorchDispatchMode):
    """Count operations that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NO_LAUNCH and not _makes_view(func):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _makes_view(func: Any) -> bool:
    """Whether an operation returns a view of an argument and writes nothing."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def count_launches(call: Callable[[], object]) -> Counter[str]:
    """Count the kernels that `call` would launch on an accelerator, by operation.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> count_launches(lambda: (x.t() * 2).sum())
    Counter({'mul': 1, 'sum': 1})
    """
    counter = LaunchCounter()
    with assume_accelerator(), counter:
        call()
    return counter.counts
