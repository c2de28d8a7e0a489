"""Weight normalization for PyTorch, after Salimans & Kingma (2016)."""

__version__ = "0.1.0"

from weightnorm import diagnostics, functional
from weightnorm.checkpoints import convert_state_dict
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
