"""Private names of torch are used through weightnorm/_torch_private.py only."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from weightnorm import torch_private

SRC = Path(__file__).parents[1] / "src" / "weightnorm"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}
ONE_FILE = Path(torch_private.__file__)

OWNERS = {
    "Conv2d": nn.Conv2d(1, 1, 1),
    "DTensor": DTensor,
    "LSTM": nn.LSTM(1, 1),
    "Module": nn.Module(),
    "MultiheadAttention": nn.MultiheadAttention(1, 1),
    "OpOverload": torch.ops.aten.add.Tensor,
    "Optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1),
    "Tensor": torch.ones(1),
    "UntypedStorage": torch.ones(1).untyped_storage(),
    "forward_ad": forward_ad,
    "parametrize": parametrize,
}
NOT_TORCH = {
    "_asdict",  # NamedTuple
    "_exit",  # os
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_torchs(name: str) -> bool:
    """Whether one of torch's objects has an attribute of this name."""
    return any(hasattr(owner, name) for owner in OWNERS.values())


def defined(tree: ast.AST) -> set[str]:
    """Names that a file or class gives to functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def private_torch_names(tree: ast.AST, ours: set[str]) -> set[str]:
    """Private names of torch that a file uses: attributes, imports and names in strings.

    A private attribute belongs to torch if we define none of this name, or if one of torch's
    objects has it too; but ``self._name`` is ours in a class that defines it.
    """
    of_self = {
        node
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for names in [defined(cls)]
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr in names
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in of_self:
            found |= {node.attr} if node.attr not in ours or is_torchs(node.attr) else set()
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
            found |= {part for name in names for part in name.split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if node.value.isidentifier() and is_torchs(node.value) else set()
    return {name for name in found if is_private(name)} - NOT_TORCH


OURS = set().union(*map(defined, TREES.values())) - set(torch_private.ATTRIBUTES)
USED = {path: private_torch_names(tree, OURS) for path, tree in TREES.items() if path != ONE_FILE}


def test_private_names_are_used_through_one_file():
    listed = set(torch_private.ATTRIBUTES)
    found = {str(path.relative_to(SRC)): names - listed for path, names in USED.items()}
    assert {path: names for path, names in found.items() if names} == {}, (
        "private names of torch: list them in torch_private.py, with the versions that have them"
    )


def test_every_listed_attribute_is_used():
    assert set(torch_private.ATTRIBUTES) == set().union(*USED.values())


@pytest.mark.parametrize("name", torch_private.ATTRIBUTES)
def test_listed_attributes_exist(name):
    owner, _ = torch_private.ATTRIBUTES[name]
    if name == "_local_tensor":  # a slot that only instances fill
        assert name in DTensor.__slots__
    else:
        assert hasattr(OWNERS[owner], name)


@pytest.mark.parametrize(
    "code",
    [
        "torch._foreach_exp(x)",
        "torch._C._get_tracing_state()",
        "from torch.nn.modules.conv import _ConvNd",
        "from torch.utils._pytree import tree_map",
        "import torch._dynamo",
        "module._buffers['mask']",
        "getattr(module, '_non_persistent_buffers_set')",
        "class A:\n def f(self):\n  return self._buffers",
        "nn.modules.module._global_forward_hooks",
    ],
)
def test_private_names_are_found(code):
    assert private_torch_names(ast.parse(code), ours={"_buffers"})


@pytest.mark.parametrize(
    "code",
    [
        "torch.add(x, y)",
        "state._ours",
        "class A:\n def f(self):\n  self._buffers = 1\n  return self._buffers",
        "os._exit(1)",
        "f'{name}_g'",
    ],
)
def test_other_names_are_not_found(code):
    assert not private_torch_names(ast.parse(code), ours={"_ours", "_buffers"})
