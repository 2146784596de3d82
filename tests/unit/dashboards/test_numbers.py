"""Numbers as people read them."""

from datetime import timedelta

import pytest
from django.utils import timezone

from dashboards.templatetags import sparsefleet as tags

DASH = tags.NONE


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_234_567, "1.23 MB"),
        (12_340_000_000, "12.34 GB"),
        (None, DASH),
        ("x", DASH),
        (True, DASH),
        (float("nan"), DASH),
    ],
)
def test_it_shows_sizes(value: object, text: str) -> None:
    assert tags.bytesize(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (340.4, "340 : 1"),
        (12_345, "12,345 : 1"),
        (1, "1.0 : 1"),
        (0.5, "0.50 : 1"),
        (0.01, "1 : 100"),
        (0.0, "0.00 : 1"),
        (1e7, "over 1,000,000 : 1"),
        (float("inf"), "over 1,000,000 : 1"),
        (None, DASH),
    ],
)
def test_it_shows_evidence_as_odds(value: object, text: str) -> None:
    assert tags.odds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.02, "20 ms"),
        (1.26, "1.3 s"),
        (59.94, "59.9 s"),
        (65, "1 m 5 s"),
        (7325, "2 h 2 m"),
        (timedelta(seconds=5), "5.0 s"),
        (None, DASH),
    ],
)
def test_it_shows_durations(value: object, text: str) -> None:
    assert tags.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12, "12"),
        (1234567, "1,234,567"),
        (1.2345, "1.23"),
        (0.00123, "0.00123"),
        (None, DASH),
    ],
)
def test_it_shows_figures(value: object, text: str) -> None:
    assert tags.figure(value) == text


def test_it_shows_shares() -> None:
    assert tags.share(1, 4) == "25.0 %"
    assert tags.share(1, 0) == DASH
    assert tags.percent(0.8686) == "86.9 %"


def test_it_says_how_long_ago() -> None:
    now = timezone.now()
    assert "5 s ago" in str(tags.ago(now - timedelta(seconds=5.2)))
    assert "3 h ago" in str(tags.ago(now - timedelta(hours=3, minutes=2)))
    assert "0 s ago" in str(tags.ago(now + timedelta(seconds=30)))
    assert tags.ago(None) == "never"


def test_it_escapes_digests_in_attributes() -> None:
    assert (
        '"' not in str(tags.short('"><b>')).replace('class="mono"', "").replace("title=", "")[8:9]
    )
    assert "<b>" not in str(tags.short('"><b>'))


def test_it_draws_a_bar_that_never_overflows() -> None:
    drawn = str(tags.bar(total=4, label="x", good=3, bad=3))
    assert 'width="75.00%"' in drawn
    assert 'width="25.00%"' in drawn
    assert 'aria-valuenow="100"' in drawn


def test_it_draws_an_empty_bar_for_nothing() -> None:
    assert "rect" not in str(tags.bar(total=0, label="x"))


def test_it_cuts_digests_and_leaves_out_what_is_empty_in_facts() -> None:
    assert tags.facts({"sha": "a" * 64, "n_t": 0}) == "sha: aaaaaaaaaaaa…, n t: 0"
    assert (
        tags.facts({"a": None, "b": "", "c": {}, "d": [], "e": True, "f": False}) == "e: yes, f: no"
    )
