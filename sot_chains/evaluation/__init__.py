"""Measures speed and quality of Skeleton-of-Thought against plain answers, on your model and questions.

The command is ``sot eval``; :func:`evaluate` does the same from Python.
"""

from sot_chains.evaluation.answers import AnswerRecord, Answers, collect_answers
from sot_chains.evaluation.data import Question, Store, read_questions
from sot_chains.evaluation.judge import ASPECTS, CRITERIA, GENERAL, Comparison, Judge, read_verdict
from sot_chains.evaluation.report import html
from sot_chains.evaluation.results import Evaluation, Judged, JudgeHealth, NetWinRate, WayFigures
from sot_chains.evaluation.run import evaluate, write

__all__ = [
    "ASPECTS",
    "CRITERIA",
    "GENERAL",
    "AnswerRecord",
    "Answers",
    "Comparison",
    "Evaluation",
    "Judge",
    "JudgeHealth",
    "Judged",
    "NetWinRate",
    "Question",
    "Store",
    "WayFigures",
    "collect_answers",
    "evaluate",
    "html",
    "read_questions",
    "read_verdict",
    "write",
]
