"""Template tags: badges, bars, and numbers as people read them."""

import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from django import template
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from dashboards.badges import BADGE_WORDS, TONES, VERIFIED_WORDS, Badge, badge_of

register = template.Library()

NONE: Final = "\N{EN DASH}"
SHA256_LETTERS: Final = 64
SECOND_MS: Final = 1000.0
_OBJECT_ROUTES: Final[Mapping[str, str]] = {
    "builds.buildjob": "build-detail",
    "fleet.device": "device-detail",
    "fleet.rollout": "rollout-detail",
}
_WAGER: Final = re.compile(r"(?<![\w.,])(\d+(?:\.\d+)?(?:e[+-]?\d+)?) : 1(?![,.]?\d)")
_STATE_WORD: Final = re.compile(
    rf"\b(?:{'|'.join(sorted(state for state in TONES if '_' in state))})\b"
)
# Stages are numbered from 0 in stored documents, from 1 on pages.
_STAGE_FIELDS: Final = frozenset({"stage", "following"})
_NOTHING: Final[tuple[object, ...]] = (None, "", [], {})
_STEPS: Final = ((86_400 * 2, 86_400, "d"), (3_600, 3_600, "h"), (60, 60, "m"))


@register.inclusion_tag("dashboards/components/badge.html")
def badge(state: object, word: str = "") -> Mapping[str, Badge]:
    """Show a state: glyph, word and tone together."""
    return {"badge": badge_of(state, word or BADGE_WORDS.get(str(state), ""))}


@register.inclusion_tag("dashboards/components/badge.html")
def verified(place: str) -> Mapping[str, Badge]:
    """Show where a bundle was verified, as a whole phrase."""
    return {"badge": badge_of(place, VERIFIED_WORDS.get(place, ""))}


@register.filter
def tone(state: object) -> str:
    """Return the CSS class of a state."""
    return badge_of(state).tone


@register.filter
def word(state: object) -> str:
    """Return the word of a state."""
    return badge_of(state).word


@register.filter
def bytesize(value: object) -> str:
    """Return a size in bytes, kB, MB or GB (powers of 1000), or a dash."""
    number = as_number(value)
    if number is None:
        return NONE
    for limit, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 2), (1e3, "kB", 1)):
        if abs(number) >= limit:
            return f"{number / limit:.{digits}f} {unit}"
    return f"{number:.0f} B"


@register.filter
def percent(value: object, digits: int = 1) -> str:
    """Return a ratio as per cent, or a dash."""
    number = as_number(value)
    return NONE if number is None else f"{number * 100:.{digits}f} %"


@register.filter
def share(part: object, whole: object) -> str:
    """Return `part` of `whole` as per cent, or a dash."""
    upper, lower = as_number(part), as_number(whole)
    return NONE if upper is None or not lower else percent(upper / lower)


@register.filter
def facts(document: object) -> str:
    """Return a flat JSON object as `name: value` words; empty values go, digests are cut.

    Stages are counted from 1, as everywhere on pages.
    """
    if not isinstance(document, Mapping):
        return str(document)
    shown = [(name, value) for name, value in document.items() if value not in _NOTHING]
    return ", ".join(
        f"{name.replace('_', ' ')}: {_fact(_counted(name, value))}" for name, value in shown
    )


@register.filter
def milliseconds(value: object) -> str:
    """Return milliseconds with three significant digits, in seconds above one, or a dash."""
    number = as_number(value)
    if number is None:
        return NONE
    return f"{_three(number)} ms" if number < SECOND_MS else f"{_three(number / SECOND_MS)} s"


@register.filter
def figure(value: object) -> str:
    """Return a plain number with thin grouping, or a dash."""
    number = as_number(value)
    if number is None:
        return NONE
    return f"{number:,.0f}" if number == int(number) else _three(number)


@register.filter
def odds(value: object) -> str:
    """Return an e-value as the words of a wager, `340 : 1`; never as a probability."""
    number = as_number(value)
    if number is None:
        return NONE
    if math.isinf(number) or number >= 1e6:
        return "over 1,000,000 : 1"
    if number >= 10:
        return f"{number:,.0f} : 1"
    if number >= 1:
        return f"{number:.1f} : 1"
    return f"1 : {1 / number:,.0f}" if 0 < number <= 0.1 else f"{number:.2f} : 1"


@register.filter
def plain(text: object) -> str:
    """Return a stored reason as people read it: wagers as everywhere, states without underscores.

    Gates store their reasons with three significant digits (`4.99e+03 : 1`).
    """
    shown = _WAGER.sub(lambda found: odds(found[1]), str(text or ""))
    return _STATE_WORD.sub(lambda found: found[0].replace("_", " "), shown)


@register.filter
def short(value: object, length: int = 12) -> SafeString | str:
    """Return the head of a digest; the whole of it is its title."""
    text = str(value or "")
    if not text:
        return NONE
    return format_html('<span class="mono" title="{}">{}</span>', text, text[:length])


@register.filter
def duration(value: object) -> str:
    """Return a `timedelta` or seconds as `1 m 5 s`, `12.3 s` or `40 ms`."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else as_number(value)
    if seconds is None:
        return NONE
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} m" if hours else f"{minutes} m {rest} s"


@register.filter
def ago(value: datetime | None) -> SafeString | str:
    """Return how long ago a moment was, with the moment itself as title and `datetime`."""
    if value is None:
        return "never"
    seconds = max(0.0, (timezone.now() - value).total_seconds())
    text = f"{seconds:.0f} s"
    for limit, size, unit in _STEPS:
        if seconds >= limit:
            text = f"{seconds / size:.0f} {unit}"
            break
    stamp = timezone.localtime(value)
    return format_html(
        '<time class="nowrap" datetime="{}" title="{} UTC">{} ago</time>',
        stamp.isoformat(timespec="seconds"),
        stamp.strftime("%Y-%m-%d %H:%M:%S"),
        text,
    )


@register.filter
def clock(value: datetime | None) -> SafeString | str:
    """Return the time of day, with the date as title."""
    if value is None:
        return NONE
    stamp = timezone.localtime(value)
    return format_html(
        '<time class="nowrap" datetime="{}" title="{} UTC">{}</time>',
        stamp.isoformat(timespec="milliseconds"),
        stamp.strftime("%Y-%m-%d %H:%M:%S"),
        stamp.strftime("%H:%M:%S"),
    )


@register.filter
def field(mapping: object, key: str) -> object:
    """Return `mapping[key]`, or None."""
    return mapping.get(key) if isinstance(mapping, Mapping) else None


@register.simple_tag
def bar(
    total: object,
    label: str,
    good: object = 0,
    live: object = 0,
    warn: object = 0,
    bad: object = 0,
    css: str = "",
) -> SafeString:
    """Draw parts of a whole as a progress bar (SVG: the style policy allows no inline width)."""
    whole = max(as_number(total) or 0.0, 1e-9)
    parts: list[SafeString] = []
    at = 0.0
    for name, value in (("good", good), ("live", live), ("warn", warn), ("bad", bad)):
        width = min(100.0 - at, 100.0 * max(0.0, as_number(value) or 0.0) / whole)
        if width > 0:
            parts.append(
                format_html(
                    '<rect class="{}" x="{}%" width="{}%" height="100%"/>',
                    name,
                    f"{at:.2f}",
                    f"{width:.2f}",
                )
            )
            at += width
    return format_html(
        '<svg class="bar {}" role="progressbar" aria-label="{}" aria-valuemin="0" '
        'aria-valuemax="100" aria-valuenow="{}" preserveAspectRatio="none">{}</svg>',
        css,
        label,
        f"{at:.0f}",
        SafeString("".join(parts)),
    )


@register.simple_tag
def object_link(object_type: str, object_id: str) -> SafeString | str:
    """Return the object of an audit line, linked to its page where it has one."""
    route = _OBJECT_ROUTES.get(object_type)
    name = object_type.rpartition(".")[2]
    if route is None or not object_id.isdecimal():
        return format_html("{} {}", name, object_id[:16])
    return format_html('<a href="{}">{} {}</a>', reverse(route, args=[object_id]), name, object_id)


def as_number(value: object) -> float | None:
    """Return a finite-or-infinite number, or None for anything that is none."""
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _counted(name: object, value: object) -> object:
    is_index = name in _STAGE_FIELDS and isinstance(value, int) and not isinstance(value, bool)
    return int(str(value)) + 1 if is_index else value


def _fact(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return f"{text[:12]}…" if len(text) == SHA256_LETTERS and text.isalnum() else text


def _three(number: float) -> str:
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{digits}f}"


@register.simple_tag(takes_context=True)
def query(context: Mapping[str, Any], **changes: object) -> str:
    """Return the query string of this request with `changes` (empty values are left out)."""
    parameters = context["request"].GET.copy()
    for name, value in changes.items():
        parameters.pop(name, None)
        if value not in (None, ""):
            parameters[name] = str(value)
    return f"?{parameters.urlencode()}" if parameters else "?"
