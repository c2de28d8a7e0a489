"""Weight normalization for PyTorch, after Salimans & Kingma (2016)."""

from weightnorm import diagnostics, functional
from weightnorm.batching import batched_weights
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
from weightnorm.optimizer import WeightNormOptimizer
from weightnorm.parameterizations import Parameterization, parameterize
from weightnorm.parametrization import WeightNorm
from weightnorm.reparam import init_, weight_norm, weight_norm_model
from weightnorm.robust_init import robust_init
from weightnorm.state_dicts import convert_state_dict, load_state_dict

__all__ = [
    "InitReport",
    "MeanOnlyBatchNorm1d",
    "MeanOnlyBatchNorm2d",
    "MeanOnlyBatchNorm3d",
    "Parameterization",
    "Parts",
    "WeightNorm",
    "WeightNormOptimizer",
    "batched_weights",
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
    "parameterize",
    "parts",
    "remove_weight_norm",
    "robust_init",
    "unnormalized_weights",
    "update_running_means",
    "weight_norm",
    "weight_norm_model",
]
