"""Weight normalization for PyTorch, after Salimans & Kingma (2016)."""

from weightnorm import functional
from weightnorm.folding import folded, remove_weight_norm
from weightnorm.functional import Parts
from weightnorm.reparam import init_, weight_norm, weight_norm_model
from weightnorm.sites import WeightNorm, is_weight_normed, normalized_weights, parts

__all__ = [
    "Parts",
    "WeightNorm",
    "folded",
    "functional",
    "init_",
    "is_weight_normed",
    "normalized_weights",
    "parts",
    "remove_weight_norm",
    "weight_norm",
    "weight_norm_model",
]
