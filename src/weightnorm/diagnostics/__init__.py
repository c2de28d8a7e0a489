"""Training diagnostics: probes, a monitor that logs them, and a linter for common mistakes."""

from weightnorm.diagnostics.linter import Finding, check
from weightnorm.diagnostics.monitor import TrainingMonitor
from weightnorm.diagnostics.probes import (
    BatchNoise,
    batch_noise,
    direction_angle,
    effective_step,
    example_gradients,
    excess_kurtosis,
    gradient_covariance,
    noise_kurtosis,
    unit_weights,
    weight_norms,
)

__all__ = [
    "BatchNoise",
    "Finding",
    "TrainingMonitor",
    "batch_noise",
    "check",
    "direction_angle",
    "effective_step",
    "example_gradients",
    "excess_kurtosis",
    "gradient_covariance",
    "noise_kurtosis",
    "unit_weights",
    "weight_norms",
]
