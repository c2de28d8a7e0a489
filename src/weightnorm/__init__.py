"""Weight normalization for PyTorch, after Salimans & Kingma (2016)."""

from weightnorm import diagnostics, functional
from weightnorm.checkpoint import convert_state_dict, load_state_dict
from weightnorm.data_init import data_dependent_init
from weightnorm.folding import folded, remove_weight_norm
from weightnorm.functional import Parts
from weightnorm.init_report import InitReport
from weightnorm.joining import together
from weightnorm.mean_only import (
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
    mean_only_batch_norm,
)
from weightnorm.optimizer import WeightNormOptimizer
from weightnorm.reparam import init_, weight_norm, weight_norm_model
from weightnorm.sites import WeightNorm, is_weight_normed, normalized_weights, parts
from weightnorm.variants import Parameterization, parameterize

__all__ = [
    "InitReport",
    "MeanOnlyBatchNorm1d",
    "MeanOnlyBatchNorm2d",
    "MeanOnlyBatchNorm3d",
    "Parameterization",
    "Parts",
    "WeightNorm",
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
    "parameterize",
    "parts",
    "remove_weight_norm",
    "together",
    "weight_norm",
    "weight_norm_model",
]
