"""Import the packages of docs/frameworks.md, or skip the test with the reason."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

IGNORED_WARNINGS = (
    # Advice on checkpoints and workers; a deprecated function of torch.
    "ignore:::lightning",
)


def need(package: str) -> None:
    """Skip the test if the package is not installed."""
    if package == "timm" and find_spec("timm") and not find_spec("torchvision"):
        _import_torchvision()
    pytest.importorskip(package, reason=f"{package} is not installed")


def _import_torchvision() -> None:
    """Import the torchvision that the Makefile installs beside a CPU build of torch.

    It is built for CUDA, so its operators do not load, and importing it raises an error unless they
    are declared. timm's models do not call them.
    """
    folder = Path(sys.prefix, "torchvision")
    if not folder.exists():
        pytest.skip("timm needs torchvision, which is not installed")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(folder))
    try:
        import torchvision  # noqa: F401
    finally:
        sys.path.remove(str(folder))


OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
"""Kept, since torch removes the operators of a library that is garbage-collected."""
