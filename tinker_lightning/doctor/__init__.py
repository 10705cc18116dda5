"""The doctor: checks the behavior of a server on scratch models, which are removed afterwards."""

from tinker_lightning.doctor.examination import CHECKS, TOKENS, examine
from tinker_lightning.doctor.report import Report

__all__ = ["CHECKS", "TOKENS", "Report", "examine"]
