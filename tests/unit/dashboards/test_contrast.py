"""Every text colour is readable on every surface it is used on (WCAG 2.2, 4.5 : 1)."""

import re
from pathlib import Path

import pytest

CSS = (Path(__file__).resolve().parents[3] / "dashboards/static/dashboards/app.css").read_text(
    "utf-8"
)
PAIRS = [
    (text, surface)
    for text in ("text", "muted", "faint", "accent", "good", "warn", "bad")
    for surface in ("bg", "panel")
] + [
    ("accent", "accent-soft"),
    ("good", "good-soft"),
    ("warn", "warn-soft"),
    ("bad", "bad-soft"),
    ("muted", "raised"),
    ("faint", "raised"),
    ("text", "line"),
    ("muted", "bad-soft"),
    ("muted", "good-soft"),
    ("muted", "warn-soft"),
]


def tokens(selector: str) -> dict[str, str]:
    block = CSS[CSS.index(selector) :].split("}", 1)[0]
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))


def luminance(color: str) -> float:
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("pair", PAIRS, ids="-on-".join)
@pytest.mark.parametrize(
    "selector", [":root {", ':root[data-theme="dark"] {'], ids=["light", "dark"]
)
def test_it_is_readable(selector: str, pair: tuple[str, str]) -> None:
    colors = tokens(selector)
    assert contrast(colors[pair[0]], colors[pair[1]]) >= 4.5


def test_it_has_one_dark_theme_in_both_places() -> None:
    assert tokens(':root:not([data-theme="light"]) {') == tokens(':root[data-theme="dark"] {')
