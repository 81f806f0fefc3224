"""Requests with marks by which tests/aimock.mjs tells them apart."""

from sot_chains import Prompts, PromptTemplates

MARKED = Prompts(
    {
        "en": PromptTemplates(
            skeleton="[outline] {question}",
            expansion="[point] {question}\n{skeleton}\nWrite point {number}. {point}",
            skeleton_opening="",
            expansion_opening="",
        )
    }
)
LABELS = ["alpha", "beta", "gamma"]
WHOLE = "\n\n".join(
    f"{number}. **{label}**: All about {label} in a few words." for number, label in enumerate(LABELS, 1)
)
