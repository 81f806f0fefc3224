"""The moving picture of the README: one question answered plainly and by points, as it happened.

Both answers are written one after the other by the same local model. Each line of text appears in the
picture at the time at which its last word was there; the picture plays at ``--speed`` of real time.

    python -m benchmarks.race_picture --output docs/pictures/race.svg
"""

from __future__ import annotations

import argparse
import asyncio
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from local_backend import ChatLocal
from sot_chains import SkeletonOfThought

QUESTION = "How can I manage my money better and save more?"
_WIDTH, _COLUMN, _LETTERS, _LINE, _TOP = 920, 440, 68, 15.5, 96
_HOLD_SECONDS = 5.0  # before the picture starts again
_STYLE = """
text { font: 11.5px ui-sans-serif, system-ui, sans-serif; fill: #1b1f24; }
.title { font-size: 14px; font-weight: 600; } .dim { fill: #57606a; } .head { font-weight: 600; }
.paper { fill: #ffffff; } .card { fill: #f6f7f9; } .track { fill: #e3e6ea; }
.plain { fill: #3b6ea8; } .sot { fill: #2f7d4f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; } .dim { fill: #a4acb5; } .paper { fill: #14171a; } .card { fill: #20252a; }
  .track { fill: #3a4149; } .plain { fill: #7fb0e6; } .sot { fill: #74c793; }
}
"""


@dataclass
class Written:
    """One answer: its parts in reading order, with the time at which each piece of text came."""

    title: str
    seconds: float = 0.0
    parts: dict[int, tuple[str, list[tuple[float, str]]]] = field(default_factory=dict)

    def lines(self) -> Iterator[tuple[str, float, bool]]:
        """Lines of text with the time of their last letter, and whether they are a heading."""
        for _, (heading, pieces) in sorted(self.parts.items()):
            written = [(when, letter) for when, piece in pieces for letter in piece if letter != "*"]
            text, times = "".join(letter for _, letter in written), [when for when, _ in written]
            if heading:
                yield heading, times[0] if times else 0.0, True
            position = 0
            for paragraph in text.splitlines():
                for line in textwrap.wrap(paragraph, _LETTERS):
                    position = text.index(line.split()[0], position) + len(line)
                    yield line, times[min(position, len(times)) - 1], False


async def record(chain: SkeletonOfThought, title: str, question: str) -> Written:
    """Writes an answer and notes when each piece of it came."""
    written, begin = Written(title), time.perf_counter()
    async for point, text in chain.astream_points(question):
        number = point.number if point else 0
        heading = f"{number}. {point.text}" if point else ""
        _, pieces = written.parts.setdefault(number, (heading, []))
        if text:
            pieces.append((time.perf_counter() - begin, text))
    written.seconds = time.perf_counter() - begin
    return written


def draw(question: str, model: str, lanes: tuple[Written, Written], speed: float) -> str:
    """The picture as an SVG document, which plays by itself and shows the end where nothing moves."""
    length = max(lane.seconds for lane in lanes) / speed + _HOLD_SECONDS
    columns = [list(lane.lines()) for lane in lanes]
    height = _TOP + _LINE * max(map(len, columns)) + 12
    pace = "in real time" if speed == 1 else f"at {speed:g} times its speed"

    def appear(seconds: float) -> str:
        share = min(0.999, seconds / speed / length)
        times = f'values="0;1" keyTimes="0;{share:.4f}" calcMode="discrete"'
        return f'<animate attributeName="opacity" dur="{length:.2f}s" repeatCount="indefinite" {times}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(question)} Answered plainly in {lanes[0].seconds:.1f} seconds, '
        f'by Skeleton-of-Thought in {lanes[1].seconds:.1f}.">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height:.0f}" rx="8"/>',
        f'<text class="title" x="15" y="26">{escape(question)}</text>',
        f'<text class="dim" x="15" y="44">{escape(model)}, one run, {pace}</text>',
    ]
    for lane, lines, colour, left in zip(
        lanes, columns, ("plain", "sot"), (15, 15 + _COLUMN + 10), strict=True
    ):
        share = lane.seconds / speed / length
        bar = _COLUMN * lane.seconds / max(other.seconds for other in lanes)
        parts += [
            f'<text class="head" x="{left}" y="66">{escape(lane.title)}</text>',
            f'<text class="head" x="{left + _COLUMN}" y="66" text-anchor="end">{lane.seconds:.1f} s'
            f"{appear(lane.seconds)}</text>",
            f'<rect class="track" x="{left}" y="73" width="{_COLUMN}" height="5" rx="2"/>',
            f'<rect class="{colour}" x="{left}" y="73" width="{bar:.1f}" height="5" rx="2">'
            f'<animate attributeName="width" dur="{length:.2f}s" repeatCount="indefinite" '
            f'values="0;{bar:.1f};{bar:.1f}" keyTimes="0;{share:.4f};1"/></rect>',
        ]
        for number, (line, seconds, is_heading) in enumerate(lines):
            kind = ' class="head"' if is_heading else ""
            y = _TOP + _LINE * number
            parts.append(f'<text{kind} x="{left}" y="{y:.1f}">{escape(line)}{appear(seconds)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder, a GGUF file or a name on the hub")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--speed", type=float, default=1.0, help="of the picture, 1 for real time")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with ChatLocal.from_pretrained(options.model, max_tokens=512) as chat:
        plain = SkeletonOfThought(chat, router="never")
        points = SkeletonOfThought(chat, router="always")
        chat.invoke("Hello", max_tokens=8)  # so that neither answer pays for the first forwards

        async def race() -> tuple[Written, Written]:
            return (
                await record(plain, "Plain decoding", options.question),
                await record(points, "Skeleton-of-Thought", options.question),
            )

        lanes = asyncio.run(race())
    name = options.model or "SmolLM2-135M on a CPU"
    options.output.write_text(draw(options.question, name, lanes, options.speed), "utf-8")
    print(f"{options.output}: {lanes[0].seconds:.2f} s plainly, {lanes[1].seconds:.2f} s by points")


if __name__ == "__main__":
    main()
