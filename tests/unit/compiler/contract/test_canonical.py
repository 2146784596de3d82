"""Canonical JSON and strict parsing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.canonical import (
    canonical_bytes,
    parse_object,
    require_sha256,
    sha256_hex,
)
from compiler.contract.errors import ContractError, LimitExceededError

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
)
_DOCUMENTS = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",))),
    st.recursive(
        _SCALARS,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner, max_size=4)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(_DOCUMENTS)
def test_it_round_trips_every_document(document) -> None:
    data = canonical_bytes(document)
    assert parse_object(data) == document
    assert canonical_bytes(parse_object(data)) == data


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
        ({"é": "ü"}, '{"é":"ü"}'.encode()),
        ({"x": 0.1}, b'{"x":0.1}'),
        ({"A": 1, "a": 2, "B": 3}, b'{"A":1,"B":3,"a":2}'),
    ],
)
def test_it_writes_one_byte_string_per_value(value, expected) -> None:
    assert canonical_bytes(value) == expected


def deep() -> list:
    value: list = []
    for _ in range(200_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), "\ud800", deep(), 10**5000],
    ids=["nan", "inf", "-inf", "surrogate", "deep", "long"],
)
def test_it_refuses_values_without_a_canonical_form(value) -> None:
    with pytest.raises(ContractError):
        canonical_bytes({"x": value})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"1",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e400}',
        b'{"a":1} x',
        b"\xff{}",
        b'{"a":' + b"9" * 10_000 + b"}",
        b'{"a":' * 50_000,
    ],
)
def test_it_refuses_documents_that_are_not_strict(data) -> None:
    with pytest.raises(ContractError):
        parse_object(data)


def test_it_refuses_a_long_document_unparsed() -> None:
    with pytest.raises(LimitExceededError):
        parse_object(json.dumps({"a": "x" * 100}).encode(), limit_bytes=50)


@pytest.mark.parametrize("value", [None, 1, "", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n"])
def test_it_refuses_what_is_no_digest(value) -> None:
    with pytest.raises(ContractError):
        require_sha256(value, "digest")


def test_it_returns_a_digest_unchanged() -> None:
    digest = sha256_hex(b"abc")
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert require_sha256(digest, "digest") == digest


@pytest.mark.parametrize(
    "data", [b'{"a":"\\ud800"}', b'{"a":["x\\uDFFF"]}', b'{"\\udc00":1}', b'{"a":"\\udc00\\ud800"}']
)
def test_it_refuses_halves_of_surrogate_pairs(data) -> None:
    with pytest.raises(ContractError, match="surrogate"):
        parse_object(data)


def test_it_reads_whole_surrogate_pairs() -> None:
    assert parse_object(b'{"a":"\\ud83d\\ude00","b":"\\\\ud800"}') == {
        "a": "\U0001f600",
        "b": "\\ud800",
    }
