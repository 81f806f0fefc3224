"""The calibration plot as an SVG file: predicted against observed shares."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.router_training.measures import Bin, calibration_error

_SIZE, _MARGIN = 320, 48


def calibration_svg(bins: Sequence[Bin], *, title: str) -> str:
    """A plot of ``bins``; a circle grows with the number of its questions."""
    span = _SIZE - 2 * _MARGIN
    most = max((one.num_questions for one in bins), default=1)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + x * span, _SIZE - _MARGIN - y * span

    ticks = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = to_pixels(share, 0)
        ticks.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{share:g}</text>')
        x, y = to_pixels(0, share)
        ticks.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    circles = []
    for one in bins:
        x, y = to_pixels(one.predicted, one.observed)
        radius = 3 + 9 * (one.num_questions / most) ** 0.5
        circles.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#2a78d6" fill-opacity="0.6">'
            f"<title>{one.num_questions} questions: {one.predicted:.2f} predicted, "
            f"{one.observed:.2f} observed</title></circle>"
        )
    (left, bottom), (right, top) = to_pixels(0, 0), to_pixels(1, 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE}" width="{_SIZE}" '
        f'height="{_SIZE}" font-family="sans-serif" font-size="11">'
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="white"/>'
        f'<rect x="{left}" y="{top}" width="{span}" height="{span}" fill="none" stroke="#bbb"/>'
        f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{top}" stroke="#bbb" stroke-dasharray="4"/>'
        + "".join(ticks + circles)
        + f'<text x="{_SIZE / 2}" y="20" text-anchor="middle" font-size="13">{title}</text>'
        f'<text x="{_SIZE / 2}" y="36" text-anchor="middle">mean gap {calibration_error(bins):.3f}</text>'
        f'<text x="{_SIZE / 2}" y="{_SIZE - 8}" text-anchor="middle">predicted share for SoT</text>'
        f'<text transform="translate(13 {_SIZE / 2}) rotate(-90)" text-anchor="middle">labelled share</text>'
        "</svg>\n"
    )
