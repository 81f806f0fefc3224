"""What is public is documented, and the examples in the documentation run."""

import doctest
import inspect

import pytest

import sot_chains
from sot_chains import chain


def test_everything_public_is_documented() -> None:
    assert sot_chains.__all__ == sorted(sot_chains.__all__, key=lambda name: (not name.isupper(), name))
    for name in sot_chains.__all__:
        public = getattr(sot_chains, name)
        if inspect.isclass(public) or inspect.isfunction(public):
            assert inspect.getdoc(public), name


def test_examples() -> None:
    assert doctest.testmod(chain).attempted > 0
    assert doctest.testmod(chain).failed == 0


@pytest.mark.parametrize("template", ["{question} {other}", "no field"])
def test_a_template_with_wrong_fields_is_named(template: str) -> None:
    with pytest.raises(ValueError, match="the skeleton template must use exactly"):
        sot_chains.PromptTemplates(skeleton=template, expansion="")


def test_prompts_need_a_language_to_fall_back_to() -> None:
    with pytest.raises(ValueError, match="need an 'en' entry"):
        sot_chains.Prompts({"zh": sot_chains.CHINESE})
