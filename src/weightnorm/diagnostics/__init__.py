"""Training diagnostics: measurements, a monitor that logs them, and a check for common mistakes."""

from weightnorm.diagnostics.linter import Finding, check
from weightnorm.diagnostics.monitor import TrainingMonitor
from weightnorm.diagnostics.probes import effective_step, v_norms

__all__ = ["Finding", "TrainingMonitor", "check", "effective_step", "v_norms"]
