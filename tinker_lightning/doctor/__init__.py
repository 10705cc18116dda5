"""Checks what a server does, on scratch models that are removed afterwards."""

from tinker_lightning.doctor.examination import CHECKS, TOKENS, examine
from tinker_lightning.doctor.report import Report

__all__ = ["CHECKS", "TOKENS", "Report", "examine"]
