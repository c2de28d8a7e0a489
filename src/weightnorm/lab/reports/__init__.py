"""Records in, figures and tables and one page out."""

from weightnorm.lab.errors import ReportError
from weightnorm.lab.reports.report import SECTIONS, ReportFiles, report

__all__ = ["SECTIONS", "ReportError", "ReportFiles", "report"]
