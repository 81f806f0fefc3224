"""Text in the encodings that files have, short and long, whole and damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_copy.stores.encodings import NotTextError, decoded

JAPANESE = "窯は八十度まで冷めてから開けます。光っている間は決して開けないでください。手袋を着用します。"
CHINESE = "窑炉冷却到八十度时可以打开，发光时绝对不能打开。请戴上手套，慢慢地抬起盖子。"
TRADITIONAL = "窯爐冷卻到八十度時可以打開，發光時絕對不能打開。請戴上手套，慢慢地抬起蓋子。"
KOREAN = "가마는 팔십 도까지 식은 뒤에 열 수 있으며 빛나는 동안에는 절대 열지 마십시오."
RUSSIAN = "Печь можно открыть, когда она остынет до восьмидесяти градусов, и никогда, пока она светится."
POLISH = (
    "Piec można otworzyć, gdy ostygnie do osiemdziesięciu stopni, i nigdy, gdy się żarzy. Załóż rękawice."
)
CZECH = "Pec lze otevřít, až vychladne na osmdesát stupňů, a nikdy, dokud žhne. Nasaďte si rukavice."
GREEK = "Ο φούρνος ανοίγει όταν κρυώσει στους ογδόντα βαθμούς και ποτέ όσο λάμπει."
HEBREW = "אפשר לפתוח את התנור כשהוא מתקרר לשמונים מעלות, ולעולם לא כשהוא זוהר."
ARABIC = "يمكن فتح الفرن عندما يبرد إلى ثمانين درجة ولا يفتح أبدا وهو متوهج."
TURKISH = "Fırın seksen dereceye soğuduğunda açılabilir ve parlarken asla açılmaz. Eldiven giyin."
GERMAN = "Der Ofen wird erst geöffnet, wenn er überall unter 80 Grad abgekühlt ist. Die Glasur wird gerührt."
FRENCH = (
    "Le four peut être ouvert dès que le cône indique 80 degrés, et jamais tant qu’il rougeoie — c’est réglé."
)
ENGLISH = "The kiln’s lid is opened at eighty degrees – never before. It costs €5, the “second” shelf €4."

LEGACY = [
    ("shift_jis", JAPANESE),
    ("euc_jp", JAPANESE),
    ("iso2022_jp", JAPANESE),
    ("gb18030", CHINESE),
    ("gbk", CHINESE),
    ("big5", TRADITIONAL),
    ("euc_kr", KOREAN),
    ("cp1251", RUSSIAN),
    ("koi8_r", RUSSIAN),
    ("cp1250", POLISH),
    ("cp1250", CZECH),
    ("iso8859_2", CZECH),
    ("cp1253", GREEK),
    ("cp1255", HEBREW),
    ("cp1256", ARABIC),
    ("cp1254", TURKISH),
    ("latin_1", GERMAN),
    ("cp1252", FRENCH),
    ("cp1252", ENGLISH),
]
UNICODE = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le"]


@pytest.mark.parametrize(("encoding", "text"), LEGACY, ids=lambda value: ascii(value)[:12])
def test_the_usual_encodings_of_a_language_are_recognised(
    encoding: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    page = f"# Kilns\n\n- see [the manual](https://example.org)\n\n{text}\n"
    for whole in (text, page, text * 40):
        assert decoded(whole.encode(encoding), name="a.txt") == whole
    assert not caplog.records


@pytest.mark.parametrize("encoding", UNICODE)
@pytest.mark.parametrize("text", [ENGLISH, GERMAN, RUSSIAN, HEBREW], ids=["en", "de", "ru", "he"])
def test_unicode_needs_no_byte_order_mark(encoding: str, text: str) -> None:
    assert decoded(text.encode(encoding), name="a.txt") == text


@pytest.mark.parametrize("encoding", ["shift_jis", "euc_jp", "cp932"])
def test_a_file_that_ends_within_a_character_is_read(encoding: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = JAPANESE * 5
    assert decoded(whole.encode(encoding)[:-1], name="notes.txt") == whole[:-1] + "\ufffd"
    assert "notes.txt has bytes that are not" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "text",
    [
        "½ cup",
        "Straße",
        "naïve, déjà vu",
        "10 µm",
        "20 °C",
        "© 2024 Müller",
        "São Paulo",
        "¿Qué?",
        "Größe: 5 m²",
    ],
)
def test_a_few_letters_are_western_ones(text: str) -> None:
    assert decoded(text.encode("cp1252"), name="a.txt") == text


def test_control_characters_are_damage_unless_there_are_many() -> None:
    page = "The kiln is opened at eighty degrees, and not before that. " * 3
    assert decoded(f"{page}\x1a".encode(), name="dos.txt") == page
    assert decoded(f"a\x0cb {page}".encode(), name="page.txt") == f"a\x0cb {page}"
    assert decoded(f"k\x08k {page}".encode(), name="man.txt") == f"k\ufffdk {page}"
    assert decoded(f"{page}\x00".encode(), name="nul.txt") == f"{page}\ufffd"
    for binary in (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)),
        bytes(64),
        b"\x7fELF\x02\x01\x01\x00",
    ):
        with pytest.raises(NotTextError):
            decoded(binary, name="image.txt")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=60))
def test_what_is_utf8_is_read_as_it_stands(text: str) -> None:
    if not text.startswith("\ufeff"):
        assert decoded(text.encode(), name="a.txt") == text


@given(st.binary(max_size=300), st.sampled_from([None, "utf-8", "shift_jis", "hex", "x"]))
def test_any_bytes_are_decoded_or_refused(content: bytes, declared: str | None) -> None:
    try:
        text = decoded(content, name="a.txt", declared=declared)
    except NotTextError:
        return
    text.encode()
