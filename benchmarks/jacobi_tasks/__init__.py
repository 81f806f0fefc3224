"""Three tasks small enough to train on a laptop, with data from grammars and scores by execution.

``python -m benchmarks.jacobi_tasks train text_to_sql`` trains a plain model, tunes it for consistency
and prints both scores. Only the grammars are shipped.
"""

from __future__ import annotations

from benchmarks.jacobi_tasks.base import Case, Split, Task, draw_cases
from benchmarks.jacobi_tasks.python_functions import PythonFunctions
from benchmarks.jacobi_tasks.text_to_sql import TextToSql
from benchmarks.jacobi_tasks.word_problems import WordProblems

TASKS: dict[str, Task] = {task.name: task for task in (TextToSql(), PythonFunctions(), WordProblems())}

__all__ = ["TASKS", "Case", "Split", "Task", "draw_cases"]
