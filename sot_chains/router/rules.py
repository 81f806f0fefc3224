"""The rules router: recognises clear cases with patterns, without a classifier or a model.

Every rule chooses the plain answer, and only where that is certain: a pattern can hardly tell that a question
*should* take Skeleton-of-Thought. If no rule applies the confidence is 0, so that the next router is asked.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from langchain_core.runnables import RunnableConfig

from sot_chains.prompts.conversation import Conversation
from sot_chains.router.route import Route, Router

CERTAIN = 0.97

Rules = Mapping[str, Callable[[str], object]]  # whether each applies, by reason for a plain answer


def _pattern(*alternatives: str) -> Callable[[str], object]:
    return re.compile("|".join(alternatives), re.IGNORECASE | re.DOTALL).search


_ARITHMETIC = re.compile(r"\d\s*(?:[-+*/×÷^=]|\*\*)\s*[-(]?\s*\d")
_OTHER_WORDS = re.compile(r"[^\W\d_]{2,}")
_PLEASE = r"^(?:please |can you |could you |now |请|帮我|给我|麻烦)*"


def _is_arithmetic(question: str) -> bool:
    """An expression or equation with at most a few words: dates and ratios occur in longer prose."""
    return bool(_ARITHMETIC.search(question)) and len(_OTHER_WORDS.findall(question)) <= 6


RULES: Rules = {
    "it contains code": _pattern(
        r"```[^\n`]*\n(?:[^`\n]*\n){3,}",  # a block of several lines: inline code proves nothing
        r"\bTraceback \(most recent call last\)",
    ),
    "it asks for a program": _pattern(
        _PLEASE + r"(?:write|implement|create|develop|code|build|give me)\b[^.?!\n]{0,60}\b"
        r"(?:function|program|script|regex|regular expression|query|class|method|subroutine|macro)\b"
        r"(?=[^.?!]*\b(?:in|that|which|to|for|using|with)\b|[.?!]?$)",
        _PLEASE + r"(?:用\s*[A-Za-z+#]+|编?写)[^。？！\n]{0,20}(?:函数|程序|代码|脚本|算法|正则|SQL|爬虫)",
    ),
    "it is arithmetic": _is_arithmetic,
    "it wants a translation": _pattern(
        _PLEASE + r"translate\b",
        _PLEASE + r"(?:[把将].{1,200})?(?:翻译|译)(?:成|一下|[:：])",
    ),
    "it wants a very short answer": _pattern(
        r"\b(?:in|with) (?:just |exactly |only )?(?:one|a single|two|[123]) (?:word|sentence|letter)s?\b",
        r"\b(?:yes or no|true or false)\b[.?]?$",
        r"用一(?:句话|个词)|只回答|^判断(?:题|对错)",
    ),
    "it is a multiple-choice question": _pattern(
        r"(?:^|\s|\()A[).．:、]\s*\S.{0,300}?(?:\s|\(|[。；;])B[).．:、]\s*\S.{0,300}?(?:\s|\(|[。；;])C[).．:、]"
    ),
    "it wants a text that is told in one piece": _pattern(
        _PLEASE + r"(?:write|compose|tell|make up|invent|create)(?: me| us)?"
        r" (?:an?|the|some) (?:[\w-]+ ){0,3}(?:story|poem|haiku|limerick|sonnet|song|joke|riddle|novel)\b",
        _PLEASE + r"(?:写|编|讲|作)一?[首个篇则段](?:[^。？！，]{0,12})(?:诗|故事|笑话|童话|歌词|寓言|小说)",
    ),
    "it is a greeting or thanks": _pattern(
        r"^(?:hi|hello|hey|thanks|thank you|good (?:morning|evening)|你好|谢谢)[^?？]{0,20}$"
    ),
}


class RulesRouter(Router):
    """Recognises questions that do not suit Skeleton-of-Thought: code, arithmetic, translations and the like.

    Args:
        rules: Checked in order; the first that applies decides.

    Example:
        >>> RulesRouter().invoke("Translate 'good night' into Dutch.").reason
        'it wants a translation'
    """

    def __init__(self, rules: Rules = RULES) -> None:
        self._rules = rules

    def decide(self, question: str) -> Route:
        """The route of a question's text; its confidence is 0 if no rule applies."""
        question = question.strip()
        for reason, applies in self._rules.items():
            if applies(question):
                return Route(False, reason, CERTAIN, "rules")
        return Route(True, "no rule applies", 0.0, "rules")

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """See :meth:`decide`."""
        return self.decide(conversation.question)


PLAINLY = RulesRouter({"to compare with": lambda question: True})  # the baseline of comparisons
