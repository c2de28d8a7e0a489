"""Private names of torch that weightnorm uses. No other file may use one that is not listed here.

Functions and classes get a name of ours. If torch lacks one, ``import weightnorm`` raises
ImportError with its name: all of them are needed.

``ATTRIBUTES`` lists private attributes of torch's objects and modules. They are read where they are
needed, since a function around them would cost a call whenever a weight is computed.

"Since" is the first release that has the name, as far as it matters: all that is marked "< 2.8" is
older than the oldest supported torch. ``tests/test_torch_private.py`` checks that every name exists
in the installed torch, and ``make test-versions`` runs it for the supported versions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

try:
    from torch.utils import _python_dispatch, _pytree

    # ---- Kernels. Since < 2.8.
    # torch's weight norm with the norm as second result, and its gradient: the fast forms.
    fused_weight_norm = torch._weight_norm_interface
    fused_weight_norm_backward = torch.ops.aten._weight_norm_interface_backward
    # What torch's autograd calls in place of the latter where a graph of the gradient is asked for.
    DIFFERENTIABLE_BACKWARD = torch.ops.aten._weight_norm_differentiable_backward.__name__
    # torch's weight norm as torch's users call it: what the benchmarks compare with.
    torch_weight_norm = torch._weight_norm
    # One call for a list of tensors; torch.optim uses the same ones.
    foreach_add_ = torch._foreach_add_
    foreach_copy_ = torch._foreach_copy_
    foreach_sub_ = torch._foreach_sub_
    foreach_mul_ = torch._foreach_mul_
    foreach_lerp_ = torch._foreach_lerp_

    # ---- State that decides whether a hand-written form may replace the formula. Since < 2.8.
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

    # ---- Hooks. Since 2.8.
    # Whether a hook is registered for all modules (nn.modules.module.register_module_…_hook).
    has_any_global_hook = nn.modules.module._has_any_global_hook

    # ---- Classes, for isinstance. Since < 2.8.
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    ConvBase = nn.modules.conv._ConvNd
    ConvTransposeBase = nn.modules.conv._ConvTransposeNd
    DropoutBase = nn.modules.dropout._DropoutNd
    MaxPoolBase = nn.modules.pooling._MaxPoolNd
    # The module of torch.nn.utils.parametrizations.weight_norm.
    TorchWeightNorm = parametrizations._WeightNorm

    # ---- Public functions of modules with a private name. Since < 2.8.
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    tree_leaves = _pytree.tree_leaves
    tree_map = _pytree.tree_map
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"weightnorm uses a private name that torch {torch.__version__} does not have ({error}); "
        "install a supported version, see docs/compatibility.md"
    ) from error

ATTRIBUTES = {
    # Attribute: (owner, since, what fails without it).
    "_parameters": ("Module", "< 2.8", "every use of weight norm"),
    "_modules": ("Module", "< 2.8", "every use of weight norm"),
    "_forward_pre_hooks": ("Module", "< 2.8", "torch's older weight norm, lazy modules"),
    "_forward_hooks": ("Module", "< 2.8", "mean_only_batch_norm"),
    "_backward_pre_hooks": ("Module", "< 2.8", "mean_only_batch_norm"),
    "_backward_hooks": ("Module", "< 2.8", "mean_only_batch_norm"),
    # Overridden, and called on the class below.
    "_load_from_state_dict": ("Module", "< 2.8", "loading the keys weight_g and weight_v"),
    "_conv_forward": ("Conv2d", "< 2.8", "mean_only_batch_norm and data_dependent_init"),
    "_flat_weights": ("LSTM", "< 2.8", "weight norm of recurrent layers"),
    "_flat_weights_names": ("LSTM", "< 2.8", "weight norm of recurrent layers"),
    "_init_flat_weights": ("LSTM", "< 2.8", "weight norm of recurrent layers"),
    "_flat_weight_refs": ("LSTM", "< 2.8", "nothing"),
    # Overridden by a function that does nothing; torch calls it when parameters are replaced.
    "_update_flat_weights": ("LSTM", "< 2.8", "nothing"),
    "_qkv_same_embed_dim": ("MultiheadAttention", "< 2.8", "weight norm of attention layers"),
    "_reset_parameters": ("MultiheadAttention", "< 2.8", "resetting a normalized attention layer"),
    # Counts in-place writes.
    "_version": ("Tensor", "< 2.8", "cached_weights, batched_weights, diagnostics.check"),
    # The address of the object that tensors with the same memory share.
    "_cdata": ("UntypedStorage", "< 2.8", "recognizing tied parameters"),
    # The shard itself; to_local() returns another tensor object.
    "_local_tensor": ("DTensor", "< 2.8", "WeightNormOptimizer on sharded weights"),
    # Whether torch.nn.utils.parametrize.cached is active.
    "_cache_enabled": ("parametrize", "< 2.8", "reading a normalized weight"),
    # ≥ 0 inside forward-mode differentiation.
    "_current_level": ("forward_ad", "< 2.8", "computing a weight"),
    # What an operator's results alias.
    "_schema": ("OpOverload", "< 2.8", "counting kernel launches in the benchmarks"),
    # Hooks and the profiler's label, which a copy of WeightNormOptimizer does not take along.
    "_zero_grad_profile_name": ("Optimizer", "< 2.8", "nothing"),
    "_optimizer_step_pre_hooks": ("Optimizer", "< 2.8", "nothing"),
    "_optimizer_step_post_hooks": ("Optimizer", "< 2.8", "nothing"),
    "_optimizer_state_dict_pre_hooks": ("Optimizer", "< 2.8", "WeightNormOptimizer.state_dict"),
    "_optimizer_state_dict_post_hooks": ("Optimizer", "< 2.8", "WeightNormOptimizer.state_dict"),
    "_optimizer_load_state_dict_pre_hooks": (
        "Optimizer",
        "< 2.8",
        "WeightNormOptimizer.load_state_dict",
    ),
    "_optimizer_load_state_dict_post_hooks": (
        "Optimizer",
        "< 2.8",
        "WeightNormOptimizer.load_state_dict",
    ),
}
"""Private attributes of torch's objects and modules that the rest of weightnorm may read."""
