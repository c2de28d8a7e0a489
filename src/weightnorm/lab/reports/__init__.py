"""Records in, figures and tables and one page out."""

from weightnorm.lab.reports.build import SECTIONS, ReportError, ReportFiles, report

__all__ = ["SECTIONS", "ReportError", "ReportFiles", "report"]
