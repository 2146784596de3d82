"""The language of degrade rules, and what a ladder and a rules document must be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.degrade import (
    MAX_RULES,
    SCHEMA,
    SIGNALS,
    Rung,
    parse_rules,
    require_falling,
    rules_bytes,
)
from compiler.contract.errors import ContractError
from compiler.contract.rule_language import (
    MAX_DEPTH,
    All,
    Any,
    Comparator,
    Comparison,
    comparisons,
    parse_condition,
)

HOT = Comparison("temperature", False, Comparator.ABOVE, 55.0, 30.0)
FAULTY = Comparison("faults", True, Comparator.AT_LEAST, 0.1, 0.0)
ROW = {
    "name": "hot",
    "when": "temperature > 55 C for 30 s",
    "leave": "temperature < 50 C for 10 s",
    "rung": "fewer_experts",
    "priority": 5,
    "cooldown_s": 60,
}


class TestLanguage:
    @pytest.mark.parametrize(
        ("text", "meaning"),
        [
            ("temperature > 55 C for 30 s", HOT),
            ("temperature>55°C for 0.5min", HOT),
            ("temperature > 55 for 30000 ms", HOT),
            ("rate(faults) >= 0.1", FAULTY),
            ("rate ( faults ) >= 0.1", FAULTY),
            ("((rate(faults) >= 0.1))", FAULTY),
            (
                "rate(faults) >= 0.1 or temperature > 55 C for 30 s and rate(faults) >= 0.1",
                Any((FAULTY, All((HOT, FAULTY)))),
            ),
            (
                "(rate(faults) >= 0.1 or temperature > 55 C for 30 s) and rate(faults) >= 0.1",
                All((Any((FAULTY, HOT)), FAULTY)),
            ),
        ],
    )
    def test_it_means_what_it_says(self, text: str, meaning: object) -> None:
        assert parse_condition(text, SIGNALS) == meaning

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "character 1: expected a signal, found 'the end'"),
            ("heat > 3", "character 1: expected a signal, found 'heat'"),
            ("temperature", "character 12: expected <, <=, > or >="),
            ("temperature = 3", "character 13: cannot read '= 3'"),
            ("temperature > hot", "character 15: expected a number"),
            ("temperature > 55 ms", "character 18: expected C"),
            ("rate(faults) > 1 ms", "character 18: expected no unit"),
            ("temperature > 55 C for 3", "character 25: expected ms, s, min"),
            ("temperature > 55 C for 90000 s", "at most 86400 s"),
            ("faults > 3", "'faults' is a counter: write rate(faults)"),
            ("rate(temperature) > 3", "'temperature' is a gauge: write temperature"),
            ("(temperature > 3", "character 17: expected ')'"),
            ("temperature > 3 battery < 2", "character 17: expected C, 'for', 'and', 'or'"),
            ("temperature > 3 C)", "character 18: expected 'and', 'or' or the end"),
            ("temperature > 1e9", "character 16"),
            ("temperature > " + "9" * 16, "at most 15 characters"),
            ("temperature > \u0663", "cannot read"),
            ("__import__('os')", "character 1"),
            ("(" * (MAX_DEPTH + 2) + "temperature > 3", "inside each other"),
            ("temperature > 3 " * 100, "at most 1000 characters"),
        ],
    )
    def test_it_says_where_it_does_not_parse(self, text: str, message: str) -> None:
        with pytest.raises(ContractError) as caught:
            parse_condition(text, SIGNALS)
        assert message in str(caught.value)

    def test_an_unknown_signal_comes_with_those_that_are_known(self) -> None:
        with pytest.raises(ContractError) as caught:
            parse_condition("heat > 3", SIGNALS)
        assert "temperature" in caught.value.hint

    @given(
        st.lists(
            st.sampled_from(
                [
                    *SIGNALS,
                    "rate",
                    "(",
                    ")",
                    "and",
                    "or",
                    "for",
                    "<",
                    ">=",
                    "3",
                    "0.5",
                    "s",
                    "C",
                    "%",
                ]
            ),
            max_size=30,
        )
    )
    def test_words_in_any_order_are_a_condition_or_refused(self, words: list[str]) -> None:
        try:
            found = comparisons(parse_condition(" ".join(words), SIGNALS))
        except ContractError:
            return
        assert found
        assert all(one.name in SIGNALS for one in found)

    @given(st.text(max_size=60))
    def test_any_text_is_a_condition_or_refused(self, text: str) -> None:
        try:
            parse_condition(text, SIGNALS)
        except ContractError:
            return


class TestDocument:
    def test_it_reads_what_was_written(self) -> None:
        (rule,) = parse_rules(rules_bytes([ROW]))
        assert (rule.name, rule.rung, rule.priority, rule.cooldown_s) == (
            "hot",
            Rung.FEWER_EXPERTS,
            5,
            60.0,
        )
        assert rule.when == HOT

    @pytest.mark.parametrize(
        "change",
        [
            {"name": ""},
            {"name": "a" * 49},
            {"name": "a\nb"},
            {"name": 3},
            {"when": "temperature >"},
            {"when": None},
            {"leave": "battery > 50 %"},
            {"rung": "normal"},
            {"rung": 3},
            {"priority": 101},
            {"priority": True},
            {"priority": 0.7},
            {"leave": "temperature < 60 C"},
            {"leave": "temperature > 55 C"},
            {"when": "battery < 15 %", "leave": "battery > 15 %"},
            {"cooldown_s": -1},
            {"cooldown_s": float("1e9")},
            {"eval": "1"},
        ],
    )
    def test_it_refuses_other_rules(self, change: dict[str, object]) -> None:
        with pytest.raises(ContractError):
            rules_bytes([{**ROW, **change}])

    @pytest.mark.parametrize(
        "rows",
        [[ROW, ROW], [{**ROW, "name": str(at)} for at in range(MAX_RULES + 1)], "rules", [3]],
    )
    def test_it_refuses_other_lists(self, rows: object) -> None:
        with pytest.raises(ContractError):
            parse_rules(json.dumps({"schema": SCHEMA, "rules": rows}).encode())


class TestLadder:
    def test_each_rung_lowers_the_bytes(self) -> None:
        require_falling({Rung.NORMAL: 100, Rung.FEWER_BITS: 60, Rung.SHARED_ONLY: 20})
        require_falling({Rung.NORMAL: 0})

    @pytest.mark.parametrize(
        "planned",
        [
            {},
            {Rung.FEWER_BITS: 60},
            {Rung.NORMAL: 100, Rung.FEWER_BITS: 100},
            {Rung.NORMAL: 100, Rung.SHARED_ONLY: 40, Rung.NARROW_DENSE: 200},
        ],
    )
    def test_a_rung_that_saves_nothing_is_refused(self, planned: dict[Rung, int]) -> None:
        with pytest.raises(ContractError):
            require_falling(planned)
