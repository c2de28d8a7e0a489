"""Training diagnostics: probes, a monitor that logs them, and a linter for common mistakes."""

from weightnorm.diagnostics.linter import Finding, check
from weightnorm.diagnostics.monitor import TrainingMonitor
from weightnorm.diagnostics.probes import (
    BatchStatistics,
    batch_statistics,
    direction_angle,
    effective_step,
    example_gradients,
    excess_kurtosis,
    gradient_covariance,
    noise_kurtosis,
    v_norms,
    weight_rows,
)

__all__ = [
    "BatchStatistics",
    "Finding",
    "TrainingMonitor",
    "batch_statistics",
    "check",
    "direction_angle",
    "effective_step",
    "example_gradients",
    "excess_kurtosis",
    "gradient_covariance",
    "noise_kurtosis",
    "v_norms",
    "weight_rows",
]
