"""Session tokens: what was issued is read back, anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.common.tokens import SessionToken, bearer, check, issue, token_key

KEY = token_key("secret")
numbers = st.integers(0, 10**15)


@given(numbers, numbers, st.integers(1, 10**12))
def test_it_reads_back_what_it_issued(device_pk, generation, expires_at):
    token = SessionToken(device_pk, generation, expires_at)
    assert check(KEY, issue(KEY, token), expires_at - 1) == token
    assert check(KEY, issue(KEY, token), expires_at) is None
    assert check(token_key("other"), issue(KEY, token), 0) is None


@given(st.text(max_size=120))
def test_it_refuses_any_text_that_it_did_not_issue(text):
    assert check(KEY, text, 0) is None


@given(st.integers(0, 60), st.characters(min_codepoint=33, max_codepoint=126))
def test_it_refuses_a_changed_token(position, character):
    good = issue(KEY, SessionToken(7, 0, 2_000_000_000))
    position %= len(good)
    changed = good[:position] + character + good[position + 1 :]
    assert (check(KEY, changed, 0) is None) == (changed != good)


@pytest.mark.parametrize(
    ("header", "text"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("", ""), ("Bearer", "")],
)
def test_it_takes_the_token_out_of_the_header(header, text):
    assert bearer(header) == text
