"""Perception in advance: the model is asked how long its answer will be before it answers.

After Zheng et al., arXiv 2305.13144; the wording of the prompts is ours. It needs no training, but a model
that follows instructions and has seen enough of its own answers; a reply that names no length gives no
prediction. Knows an engine by its ``generate``. Does not know what a prediction is used for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from local_backend.scheduling.lengths import Prediction
from local_backend.sequences.sampling import SamplingParams

if TYPE_CHECKING:
    from benchmarks.paper_scheduling.static_run import Generates

Unit = Literal["tokens", "words"]
Form = Literal["asked", "announced"]

QUESTION = (
    "Here is a request that you will be given next. Do not carry it out yet.\n\n"
    "<request>\n{prompt}\n</request>\n\n"
    "About how many {unit} will your complete answer to it have? If you are not sure, name the larger "
    "number. Reply with that one number."
)
"""The question asked before answering."""

ANNOUNCEMENT = "(Length of this answer in {unit}: "
"""The start of an answer, which the model continues with the number."""

ANNOUNCED_ANSWER = re.compile(r"\(Length of this answer in (?P<unit>tokens|words): (?P<length>[^)\n]*)\)?\s*")

TOKENS_PER_WORD = 1.35
"""For English text and vocabularies of some ten thousand tokens."""

_SIZES = {"sentence": 20, "line": 12, "paragraph": 80, "page": 400}  # words
_WORDS = {
    **{"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9},
    **{"ten": 10, "fifteen": 15, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60},
    **{"seventy": 70, "eighty": 80, "ninety": 90, "hundred": 100, "thousand": 1000},
}
_NUMBER = re.compile(
    r"(?P<number>\d{1,3}(?:[,. ]\d{3})+(?!\d)|\d+(?:\.\d+)?)(?P<thousands>\s?k\b)?"
    r"(?:\s*(?:-|–|to|or)\s*(?P<upper>\d+))?"
)
_UNIT = re.compile(r"\b(token|word|sentence|line|paragraph|page)s?\b")


def parse_length(
    text: str, *, unit: Unit = "words", tokens_per_word: float = TOKENS_PER_WORD
) -> float | None:
    """The number of tokens that a model's reply names; ``None`` if it names none.

    Understands figures ("1,200", "1.5k", the upper end of a range), small numbers in words ("about two
    hundred") and a unit after the number ("3 sentences"); without a unit, the number is in ``unit``.
    """
    text = text.lower()
    match = _NUMBER.search(text)
    if match:
        number = float(re.sub(r"[,. ](?=\d{3}(?!\d))", "", match["number"]))
        if match["thousands"]:
            number *= 1000
        if match["upper"]:
            number = max(number, float(match["upper"]))
        rest = text[match.end() :]
    else:
        in_words = _number_in_words(text)
        if in_words is None:
            return None
        number, rest = in_words
    if not 0 < number < 1e6:
        return None
    named = _UNIT.search(rest[:40])
    name = named[1] if named else unit.removesuffix("s")
    if name == "token":
        return number
    return number * _SIZES.get(name, 1) * tokens_per_word


def _number_in_words(text: str) -> tuple[float, str] | None:
    """A number in words, and the text after it: "a hundred and fifty words" is 150."""
    total = current = 0
    end = 0
    for match in re.finditer(r"[a-z]+", text):
        value = _WORDS.get(match[0])
        if value is None:
            if end and match[0] not in ("and", "a"):
                break
            continue
        if value == 100:
            current = max(1, current) * 100
        elif value == 1000:
            total, current = total + max(1, current) * 1000, 0
        else:
            current += value
        end = match.end()
    return (float(total + current), text[end:]) if end else None


def split_announced(text: str) -> tuple[float | None, str]:
    """The length that an answer announces, in tokens, and the answer without the announcement."""
    match = ANNOUNCED_ANSWER.match(text)
    if match is None:
        return None, text
    unit: Unit = "tokens" if match["unit"] == "tokens" else "words"
    return parse_length(match["length"], unit=unit), text[match.end() :]


class PerceptionInAdvance:
    """Asks the model for the length of each answer.

    Args:
        engine: Engine with the model that will answer.
        form: ``"asked"``: in a separate question before answering. ``"announced"``: at the start of the
            answer, so that the prompt is already in the engine's prefix cache; :func:`split_announced` reads
            the length from an answer that starts this way.
        unit: Unit in which the model counts; words are easier for it than tokens.
        tokens_per_word: Tokens of an average word.
        max_share: Ratio of the predicted maximum to the length the model names.
        max_tokens: Maximum tokens of the model's reply.
        render: Turns a question into prompt token ids; by default with the tokenizer's chat template.

    Raises:
        ValueError: A question cannot be rendered, because the tokenizer has no chat template.
    """

    def __init__(
        self,
        engine: Generates,
        *,
        form: Form = "asked",
        unit: Unit = "words",
        tokens_per_word: float = TOKENS_PER_WORD,
        max_share: float = 1.5,
        max_tokens: int = 16,
        render: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        if form == "asked" and render is None and not engine.tokenizer.chat_template:
            raise ValueError('the tokenizer has no chat template: give render, or use form="announced"')
        if not max_share >= 1:
            raise ValueError(f"max_share must be at least 1, got {max_share}")
        self._engine = engine
        self._form = form
        self._unit = unit
        self._tokens_per_word = tokens_per_word
        self._max_share = max_share
        self._params = SamplingParams(max_tokens=max_tokens)
        self._render = render or self._by_chat_template

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """One prediction for each prompt, ``None`` if the reply names no length or the prompt is too long.

        Blocks until the model has replied, so do not call it on the thread of the engine that it asks.
        """
        if not prompts:
            return []
        asked = {number: self._ask(prompt) for number, prompt in enumerate(prompts)}
        longest = self._engine.max_positions - (self._params.max_tokens or 0)
        asked = {number: tokens for number, tokens in asked.items() if len(tokens) <= longest}
        replies = self._engine.generate(list(asked.values()), [self._params] * len(asked))
        predictions: list[Prediction | None] = [None] * len(prompts)
        for number, reply in zip(asked, replies, strict=True):
            tokens = parse_length(reply.text, unit=self._unit, tokens_per_word=self._tokens_per_word)
            if tokens is not None:
                predictions[number] = Prediction(tokens, tokens * self._max_share)
        return predictions

    def announcing(self, prompt: Sequence[int]) -> list[int]:
        """The prompt with the start of the announcement; generate from it to get length and answer in one."""
        begun = ANNOUNCEMENT.format(unit=self._unit)
        return [*prompt, *self._engine.tokenizer.encode(begun, add_special_tokens=False)]

    def _ask(self, prompt: Sequence[int]) -> list[int]:
        if self._form == "announced":
            return self.announcing(prompt)
        text = str(self._engine.tokenizer.decode(list(prompt), skip_special_tokens=True))
        return list(self._render(QUESTION.format(prompt=text.strip(), unit=self._unit)))

    def _by_chat_template(self, question: str) -> list[int]:
        tokenizer = self._engine.tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer.encode(str(text), add_special_tokens=False))
