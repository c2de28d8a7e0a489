# ruff: noqa: E402
"""Weight normalization for PyTorch, after Salimans & Kingma (2016)."""

import os
import signal
import sys
from itertools import pairwise
from multiprocessing import parent_process

__version__ = "0.1.0"


def _exit_on_interrupt(*_: object) -> None:
    os._exit(130)


def _is_command_line() -> bool:
    """Whether this process runs the script `weightnorm`, or ``python -m weightnorm``."""
    script = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    return script == "weightnorm" or (
        script == "-m" and ("-m", "weightnorm") in pairwise(getattr(sys, "orig_argv", ()))
    )


# The command line imports torch here, which takes seconds. Until it handles Ctrl-C itself, Ctrl-C
# ends the process without a traceback.
if (
    _is_command_line()
    and parent_process() is None
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _exit_on_interrupt)

from weightnorm import diagnostics, functional
from weightnorm.checkpoints import convert_state_dict, load_state_dict
from weightnorm.data_init import data_dependent_init
from weightnorm.folding import folded, remove_weight_norm
from weightnorm.functional import Parts
from weightnorm.init_report import InitReport
from weightnorm.inspection import (
    is_weight_normed,
    normalized_weights,
    parts,
    unnormalized_weights,
)
from weightnorm.mean_only import (
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
    mean_only_batch_norm,
    update_running_means,
)
from weightnorm.module_form import init_, param_groups, weight_norm, weight_norm_model
from weightnorm.optimizer import WeightNormOptimizer
from weightnorm.parameterizations import Parameterization, parameterize
from weightnorm.robust_init import robust_init

__all__ = [
    "InitReport",
    "MeanOnlyBatchNorm1d",
    "MeanOnlyBatchNorm2d",
    "MeanOnlyBatchNorm3d",
    "Parameterization",
    "Parts",
    "WeightNormOptimizer",
    "convert_state_dict",
    "data_dependent_init",
    "diagnostics",
    "folded",
    "functional",
    "init_",
    "is_weight_normed",
    "load_state_dict",
    "mean_only_batch_norm",
    "normalized_weights",
    "param_groups",
    "parameterize",
    "parts",
    "remove_weight_norm",
    "robust_init",
    "unnormalized_weights",
    "update_running_means",
    "weight_norm",
    "weight_norm_model",
]
