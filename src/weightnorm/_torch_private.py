"""Private names of torch that weightnorm uses. No other file may use one that is not listed here.

Functions and classes get a name of ours. If torch lacks one, ``import weightnorm`` raises
ImportError with its name: all of them are needed.

``ATTRIBUTES`` lists private attributes of torch's objects and modules. They are read where they are
needed, since a function around them would cost a call whenever a weight is computed.

All exist in torch 2.6 to 2.15, unless a comment gives another version.
``tests/test_torch_private.py`` checks that they exist in the installed torch, and
``make test-versions`` runs it with the supported versions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

try:
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
    # Whether an operator has a kernel for a device type.
    dispatch_key_for_device = torch._C._dispatch_key_for_device
    dispatch_has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key

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
    tree_map = _pytree.tree_map
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"weightnorm uses a private name that torch {torch.__version__} does not have ({error}); "
        "install a supported version, see docs/compatibility.md"
    ) from error

ATTRIBUTES = {
    # Attribute: (owner, what fails without it).
    "_parameters": ("Module", "every use of weight norm"),
    "_modules": ("Module", "every use of weight norm"),
    "_buffers": ("Module", "data_dependent_init"),
    "_forward_pre_hooks": ("Module", "torch's older weight norm, lazy modules"),
    "_forward_hooks": ("Module", "mean_only_batch_norm"),
    "_backward_pre_hooks": ("Module", "mean_only_batch_norm"),
    "_backward_hooks": ("Module", "mean_only_batch_norm"),
    # Overridden, and called on the class below.
    "_load_from_state_dict": ("Module", "loading the keys weight_g and weight_v"),
    "_conv_forward": ("Conv2d", "mean_only_batch_norm and data_dependent_init"),
    "_flat_weights": ("LSTM", "weight norm of recurrent layers"),
    "_flat_weights_names": ("LSTM", "weight norm of recurrent layers"),
    "_init_flat_weights": ("LSTM", "weight norm of recurrent layers"),
    "_flat_weight_refs": ("LSTM", "nothing"),
    # Overridden by a function that does nothing; torch calls it when parameters are replaced.
    "_update_flat_weights": ("LSTM", "nothing"),
    "_qkv_same_embed_dim": ("MultiheadAttention", "weight norm of attention layers"),
    "_reset_parameters": ("MultiheadAttention", "resetting a normalized attention layer"),
    # Counts in-place writes.
    "_version": ("Tensor", "cached_weights, batched_weights, diagnostics.check"),
    # The address of the object that tensors with the same memory share.
    "_cdata": ("UntypedStorage", "recognizing tied parameters"),
    # The shard itself; to_local() returns another tensor object.
    "_local_tensor": ("DTensor", "WeightNormOptimizer on sharded weights"),
    # Whether torch.nn.utils.parametrize.cached is active.
    "_cache_enabled": ("parametrize", "reading a normalized weight"),
    # ≥ 0 inside forward-mode differentiation.
    "_current_level": ("forward_ad", "computing a weight"),
    # What an operator's results alias.
    "_schema": ("OpOverload", "counting kernel launches in the benchmarks"),
    # Hooks and the profiler's label, which a copy of WeightNormOptimizer does not take along.
    "_zero_grad_profile_name": ("Optimizer", "nothing"),
    "_optimizer_step_pre_hooks": ("Optimizer", "nothing"),
    "_optimizer_step_post_hooks": ("Optimizer", "nothing"),
    "_optimizer_state_dict_pre_hooks": ("Optimizer", "WeightNormOptimizer.state_dict"),
    "_optimizer_state_dict_post_hooks": ("Optimizer", "WeightNormOptimizer.state_dict"),
    "_optimizer_load_state_dict_pre_hooks": (
        "Optimizer",
        "WeightNormOptimizer.load_state_dict",
    ),
    "_optimizer_load_state_dict_post_hooks": (
        "Optimizer",
        "WeightNormOptimizer.load_state_dict",
    ),
}
"""Private attributes of torch's objects and modules that the rest of weightnorm may read."""
