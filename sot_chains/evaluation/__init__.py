"""Measures speed and quality of Skeleton-of-Thought against plain answers, on your model and questions.

The command is ``sot eval``; :func:`evaluate` does the same from Python.
"""

from sot_chains.evaluation.judge import CRITERIA, GENERAL, Judge, Question, Store, read_questions
from sot_chains.evaluation.run import Evaluation, evaluate, markdown, write

__all__ = ["CRITERIA", "GENERAL", "Evaluation", "Judge", "Question", "Store", "evaluate", "markdown"]
__all__ += ["read_questions", "write"]
