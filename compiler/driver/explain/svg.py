"""A picture of `compiler.driver.explain.picture` as an SVG file of its own, light and dark."""

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from compiler.driver.explain.picture import NODE_HEIGHT

_STYLE: Final = """
svg{--ink:#1d2433;--faint:#5b6577;--page:#fff;--box:#f4f6f9;--line:#c3cad6;--frame:#8792a6;
--tiled:#2f6fd6;--sparse:#0f8a5f;--plain:#8a6d1d;--move:#8792a6;--reference:#c2413b;
font:12px system-ui,sans-serif}
@media (prefers-color-scheme:dark){svg{--ink:#e7ebf3;--faint:#a3adbf;--page:#12161f;--box:#1c2230;
--line:#3a4457;--frame:#66728a;--tiled:#6ea4ff;--sparse:#42c997;--plain:#d9b44a;--move:#66728a;
--reference:#ff7b72}}
.page{fill:var(--page)}text{fill:var(--ink)}.faint{fill:var(--faint);font-size:11px}
.head{font-size:14px;font-weight:600}.box{fill:var(--box);stroke:var(--line)}
.tiled{fill:var(--tiled)}.sparse{fill:var(--sparse)}.plain{fill:var(--plain)}.move{fill:var(--move)}
.reference{fill:var(--reference)}
.edge{fill:none;stroke:var(--frame)}.skip{stroke-dasharray:4 3}
.frame{fill:none;stroke:var(--frame);stroke-dasharray:2 3}.track{fill:var(--line)}
"""
LEGEND: Final = (
    ("tiled", "W4 tile kernel"),
    ("sparse", "leaves work out"),
    ("plain", "vector kernel"),
    ("move", "moves data only"),
    ("reference", "reference kernel"),
)
LEGEND_HEIGHT: Final = 40
LEGEND_STEP: Final = 130
TITLE_CHARACTERS: Final = 22
SOURCE_CHARACTERS: Final = 30


def svg_text(picture: Mapping[str, Any]) -> str:
    """Return the SVG document; every text in it is escaped."""
    width = max(picture["width"], LEGEND_STEP * len(LEGEND))
    height = picture["height"] + LEGEND_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-LEGEND_HEIGHT} {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="The plan, call by call">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" y="{-LEGEND_HEIGHT}" width="{width}" height="{height}"/>',
        *(_frame(item) for item in picture["frames"]),
        *(_edge(item) for item in picture["edges"]),
        *(_node(item) for item in picture["nodes"]),
        *(_heading(item) for item in picture["headings"]),
        _legend(picture["shares"]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def short_title(text: str) -> str:
    """Return a title that fits into a node."""
    return text if len(text) <= TITLE_CHARACTERS else text[: TITLE_CHARACTERS - 1] + "…"


def short_source(item: Mapping[str, Any]) -> str:
    """Return the source line of a node, cut in the middle of the name so that it fits."""
    text = str(item.get("source", ""))
    if len(text) <= SOURCE_CHARACTERS:
        return text
    head = SOURCE_CHARACTERS // 3
    return text[:head] + "…" + text[head + 1 - SOURCE_CHARACTERS :]


def _frame(item: Mapping[str, Any]) -> str:
    x, y = item["x"], item["y"]
    return (
        f'<rect class="frame" x="{x}" y="{y}" width="{item["width"]}" height="{item["height"]}" '
        f'rx="8"/><text class="faint" x="{x + 4}" y="{y - 4}">{escape(item["label"])}</text>'
    )


def _edge(item: Mapping[str, Any]) -> str:
    kind = "edge skip" if item["is_skip"] else "edge"
    return f'<path class="{kind}" d="{escape(item["path"])}"/>'


def _node(item: Mapping[str, Any]) -> str:
    x, y, width = item["x"], item["y"], item["width"]
    bottom = y + NODE_HEIGHT
    share = max(1.0, (width - 12) * item["share_ratio"]) if item["share_ratio"] else 0.0
    detail = f"{item['detail']} · {item['density']}" if item["density"] else item["detail"]
    return (
        f"<g><title>{escape(item['hint'])}</title>"
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{NODE_HEIGHT}" rx="5"/>'
        f'<rect class="{escape(item["tone"])}" x="{x}" y="{y + 5}" width="4" '
        f'height="{NODE_HEIGHT - 10}" rx="2"/>'
        f'<text x="{x + 11}" y="{y + 17}">{escape(short_title(item["title"]))}</text>'
        f'<text class="faint" x="{x + 11}" y="{y + 33}">{escape(detail)}</text>'
        f'<text class="faint" x="{x + 11}" y="{y + 48}">{escape(short_source(item))}</text>'
        f'<text class="faint" x="{x + width - 8}" y="{y + 17}" text-anchor="end">'
        f"{escape(item['share'])}</text>"
        f'<rect class="track" x="{x + 6}" y="{bottom - 6}" width="{width - 12}" height="3" rx="1"/>'
        f'<rect class="{escape(item["tone"])}" x="{x + 6}" y="{bottom - 6}" width="{share:.1f}" '
        'height="3" rx="1"/></g>'
    )


def _heading(item: Mapping[str, Any]) -> str:
    x, y = item["x"], item["y"]
    return (
        f'<text class="head" x="{x}" y="{y}">{escape(item["title"])}</text>'
        f'<text class="faint" x="{x}" y="{y + 17}">{escape(item["detail"])}</text>'
    )


def _legend(shares: str) -> str:
    """Return the legend, above the drawing: pictures of large models are long."""
    y = -LEGEND_HEIGHT // 2 - 2
    parts = []
    x = 16
    for tone, text in LEGEND:
        parts.append(f'<rect class="{tone}" x="{x}" y="{y - 8}" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="faint" x="{x + 15}" y="{y}">{text}</text>')
        x += LEGEND_STEP
    parts.append(
        f'<text class="faint" x="16" y="{y + 16}">per cent and lower bar: share of the program\'s '
        f"time, {escape(shares)}</text>"
    )
    return "".join(parts)
