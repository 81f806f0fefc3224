"""Python functions from their docstring, scored by running their tests in a process with a time limit.

A function filters a list of numbers or strings, changes each element and folds them into a result. The
docstring says in words what the body does in code.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.jacobi_tasks.base import Case, Split, split_of, word_list

_TIME_LIMIT_SECONDS = 10.0
_NUM_TESTS = 5
_MAX_MEMORY_BYTES = 512 * 2**20

# (words, code): {n} is a number of the docstring, {x} the element.
_NUMBER_FILTERS = (
    ("even", "{x} % 2 == 0"),
    ("odd", "{x} % 2 == 1"),
    ("positive", "{x} > 0"),
    ("negative", "{x} < 0"),
    ("greater than {n}", "{x} > {n}"),
    ("less than {n}", "{x} < {n}"),
    ("at least {n}", "{x} >= {n}"),
    ("at most {n}", "{x} <= {n}"),
    ("divisible by {k}", "{x} % {k} == 0"),
    ("not divisible by {k}", "{x} % {k} != 0"),
    ("different from {n}", "{x} != {n}"),
    ("between {n} and {m}", "{n} <= {x} <= {m}"),
)
_NUMBER_CHANGES = (
    ("the square of {it}", "{x} * {x}"),
    ("the cube of {it}", "{x} ** 3"),
    ("{it} plus {k}", "{x} + {k}"),
    ("{it} minus {k}", "{x} - {k}"),
    ("{it} times {k}", "{x} * {k}"),
    ("{it} divided by {k} without remainder", "{x} // {k}"),
    ("the remainder of {it} by {k}", "{x} % {k}"),
    ("the absolute value of {it}", "abs({x})"),
    ("the negative of {it}", "-{x}"),
)
_STRING_FILTERS = (
    ("longer than {k} characters", "len({x}) > {k}"),
    ("shorter than {k} characters", "len({x}) < {k}"),
    ("starting with '{c}'", "{x}.startswith('{c}')"),
    ("ending with '{c}'", "{x}.endswith('{c}')"),
    ("containing '{c}'", "'{c}' in {x}"),
    ("not containing '{c}'", "'{c}' not in {x}"),
)
_STRING_CHANGES = (
    ("{it} in upper case", "{x}.upper()"),
    ("{it} reversed", "{x}[::-1]"),
    ("{it} followed by '{c}'", "{x} + '{c}'"),
    ("the first {k} characters of {it}", "{x}[:{k}]"),
    ("the last {k} characters of {it}", "{x}[-{k}:]"),
    ("{it} with '{c}' replaced by '{d}'", "{x}.replace('{c}', '{d}')"),
    ("{it} repeated {k} times", "{x} * {k}"),
)
_LENGTH_CHANGES = (
    ("the length of {it}", "len({x})"),
    ("how often '{c}' occurs in {it}", "{x}.count('{c}')"),
)
_PLURALS = {"numbers": "number", "values": "value", "items": "item", "entries": "entry"}
_STRING_PLURALS = {"words": "word", "names": "name", "lines": "line", "texts": "text"}
_WORDS = word_list("apple river stone green lamp otter maple cloud bread violin tiger echo salt noon amber")
_INDENT = "    "


class PythonFunctions:
    """One function to write: the signature and docstring are given, the body is asked for."""

    name = "python"

    def make(self, rng: random.Random, split: Split) -> Case | None:
        """A function; its docstring decides the split."""
        of_strings = rng.random() < 0.4
        plural, element = rng.choice(list((_STRING_PLURALS if of_strings else _PLURALS).items()))
        numbers = _constants(rng)
        form = rng.choice((_collect, _collect, _fold, _count, _best, _first, _group))
        words, body = form(rng, plural, element, numbers, of_strings)
        if split_of(words) != split:
            return None
        function = (
            f"{rng.choice(('solve', 'compute', 'build', 'find', 'make'))}_{element}_{rng.choice('abcd')}"
        )
        prompt = f'def {function}({plural}):\n{_INDENT}"""{words}"""\n'
        code = prompt + body
        tests = _tests(code, function, rng, of_strings)
        if tests is None:
            return None
        return Case(prompt, body, {"function": function, "tests": tests})

    def score(self, cases: Sequence[Case], texts: Sequence[str]) -> list[bool]:
        """Whether each function passes all its tests, in a separate process with a time limit."""
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(passes, cases, texts))


def passes(case: Case, body: str) -> bool:
    """Run one function on its tests."""
    return run_tests(case.prompt + body, case.facts) == "passed"


_RUNNER = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
code, function, tests = json.load(sys.stdin)
names = {{}}
exec(compile(code, "answer", "exec"), names)
for argument, expected in tests:
    got = names[function](argument)
    if json.loads(json.dumps(got)) != expected or type(got) is not type(expected):
        sys.exit(1)
print("passed", end="")
"""


def run_tests(code: str, facts: Mapping[str, Any], *, time_limit_seconds: float = _TIME_LIMIT_SECONDS) -> str:
    """``"passed"``, ``"failed"`` or ``"timeout"``.

    The process is isolated (``-I``), has bounded memory and no input but the tests. It is not a sandbox: run
    the code of models you do not trust in a container.
    """
    task = json.dumps([code, facts["function"], facts["tests"]])
    command = [sys.executable, "-I", "-S", "-c", _RUNNER.format(memory=_MAX_MEMORY_BYTES)]
    try:
        done = subprocess.run(
            command, input=task, capture_output=True, text=True, timeout=time_limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    return "passed" if done.returncode == 0 and done.stdout == "passed" else "failed"


def _constants(rng: random.Random) -> dict[str, str]:
    low = rng.randrange(2, 30)
    first, second = rng.sample("abcdeiorst", 2)
    return {
        "n": str(low),
        "m": str(low + rng.randrange(2, 30)),
        "k": str(rng.randrange(2, 8)),
        "c": first,
        "d": second,
    }


def _condition(
    rng: random.Random, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    words, code = rng.choice(_STRING_FILTERS if of_strings else _NUMBER_FILTERS)
    return words.format(**constants), code.format(x=element, **constants)


def _change(rng: random.Random, element: str, constants: dict[str, str], of_strings: bool) -> tuple[str, str]:
    words, code = rng.choice((*_STRING_CHANGES, *_LENGTH_CHANGES) if of_strings else _NUMBER_CHANGES)
    return words.format(it="each", **constants), code.format(x=element, **constants)


def _number_change(
    rng: random.Random, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    words, code = rng.choice(_LENGTH_CHANGES if of_strings else _NUMBER_CHANGES)
    return words.format(it="each", **constants), code.format(x=element, **constants)


def _that_are(rng: random.Random, plural: str, condition: str) -> str:
    return f"{rng.choice(('the', 'all', 'those'))} {plural} {condition}"


def _lines(*lines: str) -> str:
    """Body of a function; each leading tab is one level."""
    return "\n".join(
        _INDENT + _INDENT * (len(line) - len(line.lstrip("\t"))) + line.lstrip("\t") for line in lines
    )


def _conditions(
    rng: random.Random, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    words, code = _condition(rng, element, constants, of_strings)
    if rng.random() < 0.3:
        other_words, other_code = _condition(rng, element, _constants(rng), of_strings)
        joint = rng.choice(("and", "or"))
        return f"{words} {joint} {other_words}", f"{code} {joint} {other_code}"
    return words, code


_Form = Callable[[random.Random, str, str, dict[str, str], bool], tuple[str, str]]


def _collect(
    rng: random.Random, plural: str, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    condition, test = _conditions(rng, element, constants, of_strings)
    change, value = _change(rng, element, constants, of_strings)
    ending, last = rng.choice(
        (
            ("", "return result"),
            ("", "return result"),
            (", sorted", "return sorted(result)"),
            (", in reverse order", "return result[::-1]"),
            (", each only once and sorted", "return sorted(set(result))"),
        )
    )
    words = (
        f"{rng.choice(('Return', 'Give', 'List'))} {change} of {_that_are(rng, plural, condition)}{ending}."
    )
    return words, _lines(
        "result = []", f"for {element} in {plural}:", f"\tif {test}:", f"\t\tresult.append({value})", last
    )


def _fold(
    rng: random.Random, plural: str, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    condition, test = _conditions(rng, element, constants, of_strings)
    change, value = _number_change(rng, element, constants, of_strings)
    name, start, sign = rng.choice((("sum", "0", "+="), ("sum", "0", "+="), ("product", "1", "*=")))
    opening = rng.choice(("Return", "Compute", "Give"))
    words = f"{opening} the {name} of {change} of {_that_are(rng, plural, condition)}."
    return words, _lines(
        f"total = {start}",
        f"for {element} in {plural}:",
        f"\tif {test}:",
        f"\t\ttotal {sign} {value}",
        "return total",
    )


def _count(
    rng: random.Random, plural: str, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    condition, test = _conditions(rng, element, constants, of_strings)
    opening = rng.choice(("Count", "Return how many there are of", "Give the number of"))
    words = f"{opening} {_that_are(rng, plural, condition)}."
    return words, _lines(
        "count = 0", f"for {element} in {plural}:", f"\tif {test}:", "\t\tcount += 1", "return count"
    )


def _best(
    rng: random.Random, plural: str, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    condition, test = _conditions(rng, element, constants, of_strings)
    change, value = _number_change(rng, element, constants, of_strings)
    name, sign = rng.choice((("largest", ">"), ("smallest", "<")))
    words = f"Return the {name} value of {change} among {_that_are(rng, plural, condition)}, or None."
    return words, _lines(
        "best = None",
        f"for {element} in {plural}:",
        f"\tif {test}:",
        f"\t\tcandidate = {value}",
        f"\t\tif best is None or candidate {sign} best:",
        "\t\t\tbest = candidate",
        "return best",
    )


def _first(
    rng: random.Random, plural: str, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    condition, test = _conditions(rng, element, constants, of_strings)
    which, order = rng.choice((("first", plural), ("last", f"reversed({plural})")))
    change, value = _change(rng, element, constants, of_strings)
    words = f"Return {change} for the {which} of {_that_are(rng, plural, condition)}, or None."
    return words, _lines(f"for {element} in {order}:", f"\tif {test}:", f"\t\treturn {value}", "return None")


def _group(
    rng: random.Random, plural: str, element: str, constants: dict[str, str], of_strings: bool
) -> tuple[str, str]:
    condition, test = _conditions(rng, element, constants, of_strings)
    change, value = _change(rng, element, constants, of_strings)
    words = f"Split {plural} in two lists: {change} of those {condition}, and the others unchanged."
    return words, _lines(
        "chosen = []",
        "others = []",
        f"for {element} in {plural}:",
        f"\tif {test}:",
        f"\t\tchosen.append({value})",
        "\telse:",
        f"\t\tothers.append({element})",
        "return [chosen, others]",
    )


def _tests(code: str, function: str, rng: random.Random, of_strings: bool) -> list[Any] | None:
    """Arguments and the correct body's results; ``None`` if all results are the same."""
    names: dict[str, Any] = {}
    exec(compile(code, "reference", "exec"), names)  # code from the grammar
    tests: list[Any] = []
    for _ in range(_NUM_TESTS):
        argument: list[Any]
        if of_strings:
            argument = [rng.choice(_WORDS)[: rng.randrange(2, 7)] for _ in range(rng.randrange(6, 14))]
        else:
            argument = [rng.randrange(-40, 60) for _ in range(rng.randrange(12, 25))]
        tests.append([argument, names[function](argument)])
    tests.append([[], names[function]([])])
    return tests if len({json.dumps(expected) for _, expected in tests}) > 1 else None
