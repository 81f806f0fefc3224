"""Words and values for made-up documents: drawn from lists, or invented from syllables.

Nothing here means anything: a name or a number that was never seen can only be copied. Knows random numbers
and word lists. Does not know sentences.
"""

from __future__ import annotations

import random
import string
import tomllib
from collections.abc import Mapping
from functools import cache

from local_backend.embedded.corpus import CORPUS


def _spaced(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _spaced(
    "b bl br c ch cl d dr f fl g gl gr h j k kl kr l m n p pr qu r s sch sh sk sl st str t th tr v w y z"
)
_VOWELS = _spaced("a e i o u a e i o u ai ea ee ie oa ou y ae")
_CODAS = _spaced("b ck d f g k l ll lm m n n nd ng nt p r r rk rn rt s s sk ss st t th v x z")
_PLACE_ENDINGS = _spaced("ville ton burg ford wick stad mouth ow haven dale by field heim")
_FOLDERS = _spaced("/etc /var/lib ~ conf src")
_FILE_ENDINGS = _spaced("toml json log yaml txt db")
_ACTIONS = _spaced("install setup reset undo apply sync")
_COMPANY_ENDINGS = ["Ltd", "Group", "Works", "& Sons", "Brothers", "Systems", "Foods", "Union", "Club"]


@cache
def words() -> Mapping[str, tuple[str, ...]]:
    """The word lists of ``corpus/words.toml`` by kind."""
    table = tomllib.loads((CORPUS / "words.toml").read_text("utf-8"))
    two_words = {"building": ("town hall", "market hall"), "meal": ("evening meal",)}
    lists = {}
    for kind, listed in table.items():
        text = listed
        for pair in two_words.get(kind, ()):
            text = text.replace(pair, pair.replace(" ", "_"))
        lists[kind] = tuple(word.replace("_", " ") for word in text.split())
    return lists


def invented_word(rng: random.Random, syllables: int = 0) -> str:
    """A word that can be pronounced and means nothing."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if rng.random() < 0.5 else "")
        for _ in range(syllables or rng.choice((1, 2, 2, 3)))
    )


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 3)))
    digits = "".join(rng.choices(string.digits, k=rng.randint(1, 5)))
    return rng.choice(
        (f"{letters}-{digits}", f"{letters}{digits}", f"{digits}{letters}", f"{letters}/{digits}")
    )


def _number(rng: random.Random) -> str:
    number = rng.choice((rng.randint(11, 99), rng.randint(100, 999), rng.randint(1000, 99_999)))
    if number > 999 and rng.random() < 0.5:
        return f"{number:,}"
    return f"{number}.{rng.randint(1, 9)}" if rng.random() < 0.1 else str(number)


def _snake(rng: random.Random) -> str:
    parts = [
        rng.choice((rng.choice(words()["any"]), invented_word(rng))) for _ in range(rng.choice((1, 2, 2, 3)))
    ]
    return "_".join(parts)


def _dotted(rng: random.Random) -> str:
    """Something with full stops in it that end no sentence."""
    return rng.choice(
        (
            value_of("email", rng),
            value_of("version", rng),
            f"{invented_word(rng)}.{rng.choice((*_FILE_ENDINGS, 'com', 'org'))}",
            f"{rng.choice(words()['any'])}.{_snake(rng)}",
        )
    )


def _money(rng: random.Random) -> str:
    amount = _number(rng)
    return rng.choice(
        (f"{amount} euros", f"{amount} dollars", f"${amount}", f"€{amount}", f"{amount} crowns")
    )


def _hour(rng: random.Random) -> str:
    hour = rng.randint(1, 12)
    return rng.choice(
        (
            f"{hour}:{rng.choice(('00', '15', '30', '45'))}",
            f"{hour} o'clock",
            f"{hour} {rng.choice(('am', 'pm'))}",
        )
    )


def _person(rng: random.Random) -> str:
    names = [invented_word(rng, rng.choice((1, 2))).capitalize() for _ in range(rng.choice((2, 2, 2, 3)))]
    return rng.choice(("", "", "", "Dr ", "Ms ", "Mr ")) + " ".join(names)


def _company(rng: random.Random) -> str:
    name = invented_word(rng).capitalize()
    return f"{name} {rng.choice(_COMPANY_ENDINGS)}" if rng.random() < 0.5 else name


def _product(rng: random.Random) -> str:
    name = invented_word(rng).capitalize()
    return rng.choice((name, f"{name} {rng.randint(2, 990)}", f"{name} {_code(rng)}"))


def value_of(kind: str, rng: random.Random) -> str:
    """Something invented, or drawn from a list, that fits the field ``kind``."""
    capital = invented_word(rng).capitalize()
    match kind:
        case "company":
            return _company(rng)
        case "person":
            return _person(rng)
        case "place":
            return rng.choice((capital, invented_word(rng, 1).capitalize() + rng.choice(_PLACE_ENDINGS)))
        case "river":
            return rng.choice((f"{capital} river", capital))
        case "product":
            return _product(rng)
        case "planet" | "medicine" | "program":
            return capital if rng.random() < 0.8 else capital.lower()
        case "code":
            return _code(rng)
        case "number":
            return _number(rng)
        case "smallnumber":
            small = [
                "two",
                "three",
                "four",
                "five",
                "six",
                "seven",
                "eight",
                "nine",
                "ten",
                "twelve",
                "fifteen",
                "twenty",
            ]
            return rng.choice((str(rng.randint(2, 30)), rng.choice(small)))
        case "year":
            return str(rng.randint(1480, 2060))
        case "date":
            return f"{rng.randint(1, 31)} {value_of('month', rng)} {value_of('year', rng)}"
        case "money":
            return _money(rng)
        case "percent":
            return f"{rng.randint(2, 98)} percent"
        case "hour":
            return _hour(rng)
        case "phone":
            return f"0{rng.randint(10, 999)} {rng.randint(1000, 999_999)}"
        case "email":
            return f"{invented_word(rng)}@{invented_word(rng)}.{rng.choice(('org', 'example', 'net'))}"
        case "function":
            return rng.choice((_snake(rng), f"{_snake(rng)}()", f"{invented_word(rng)}.{_snake(rng)}"))
        case "variable":
            return _snake(rng).upper()
        case "option":
            return "--" + _snake(rng).replace("_", "-")
        case "path":
            return f"{rng.choice(_FOLDERS)}/{_snake(rng)}.{rng.choice(_FILE_ENDINGS)}"
        case "command":
            return f"{invented_word(rng)} {rng.choice(_ACTIONS)} {value_of('option', rng)}"
        case "version":
            version = f"{rng.randint(0, 20)}.{rng.randint(0, 30)}"
            return version if rng.random() < 0.7 else f"{version}.{rng.randint(0, 9)}"
        case _:
            # Now and then another word than the kind would have, so that words are copied and not guessed.
            if kind not in ("month", "weekday", "color") and rng.random() < 0.25:
                return rng.choice((rng.choice(words()["any"]), invented_word(rng)))
            return rng.choice(words()[kind])


def random_word(rng: random.Random) -> str:
    """Any word: a real one, an invented one, a code, a number, a name with full stops in it."""
    draw = rng.random()
    if draw < 0.74:
        return rng.choice(words()["any"])
    if draw < 0.9:
        return invented_word(rng)
    return rng.choice((_code, _number, _snake, _dotted))(rng)


__all__ = ["invented_word", "random_word", "value_of", "words"]
