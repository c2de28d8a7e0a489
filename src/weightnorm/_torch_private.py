"""Private functions and classes of torch that weightnorm uses, under names of ours.

If torch lacks one, ``import weightnorm`` raises ImportError with its name: all of them are needed.
All exist in torch 2.6 to 2.15, unless a comment gives another version.

Private attributes of torch's objects are read where they are needed, since a function around them
would cost a call whenever a weight is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

try:
    from torch import _compile
    from torch.optim import optimizer
    from torch.utils import _python_dispatch, _pytree

    # ---- Kernels.
    # torch's weight norm with the norm as second result, and its gradient: the fast forms.
    fused_weight_norm = torch._weight_norm_interface
    fused_weight_norm_backward = torch.ops.aten._weight_norm_interface_backward
    # What torch's autograd calls in place of the latter where a graph of the gradient is asked for.
    DIFFERENTIABLE_BACKWARD = torch.ops.aten._weight_norm_differentiable_backward.__name__
    # torch's weight norm as torch's users call it: what the benchmarks compare with.
    torch_weight_norm = torch._weight_norm
    # One call for a list of tensors; torch.optim uses the same ones.
    foreach_add_ = torch._foreach_add_
    foreach_sub_ = torch._foreach_sub_
    foreach_mul_ = torch._foreach_mul_
    foreach_lerp_ = torch._foreach_lerp_

    # ---- State that decides whether a hand-written form may replace the formula.
    # Number of active TorchDispatchModes, which may replace values (FakeTensorMode, make_fx).
    len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
    # Whether code runs inside torch.func.grad, vmap, jvp and the like.
    are_functorch_transforms_active = torch._C._are_functorch_transforms_active
    # Not None during torch.jit.trace; torch.jit.is_tracing makes two more calls.
    get_tracing_state = torch._C._get_tracing_state
    # ≥ 0 during a backward pass, where activation checkpointing repeats the forward pass.
    current_graph_task_id = torch._C._current_graph_task_id

    # ---- Optimizers.
    # Hooks that torch.optim.optimizer.register_optimizer_step_{pre,post}_hook registered.
    GLOBAL_OPTIMIZER_HOOKS: tuple[dict[int, Any], ...] = (
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    )
    # torch.compiler.disable, but torch._dynamo is imported when the function is first called.
    disable_dynamo = _compile._disable_dynamo

    # ---- Hooks.
    # Whether a hook is registered for all modules (nn.modules.module.register_module_…_hook);
    # since torch 2.8.
    has_any_global_hook = nn.modules.module._has_any_global_hook

    # ---- Classes, for isinstance.
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    ConvBase = nn.modules.conv._ConvNd
    ConvTransposeBase = nn.modules.conv._ConvTransposeNd
    # The module of torch.nn.utils.parametrizations.weight_norm.
    TorchWeightNorm = parametrizations._WeightNorm

    # ---- Public functions of modules with a private name.
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    tree_leaves = _pytree.tree_leaves
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"weightnorm uses a private name that torch {torch.__version__} does not have ({error}); "
        "install a supported version, see docs/conformance.md"
    ) from error
