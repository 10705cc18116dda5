"""The doctor: checks the behavior of a server on scratch models, which are removed afterwards."""

from tinker_lightning.doctor.examination import CHECKS, TOKENS, Report, examine

__all__ = ["CHECKS", "TOKENS", "Report", "examine"]
