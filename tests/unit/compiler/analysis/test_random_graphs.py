"""No element that is proved zero is ever anything else, over random functions of every rule."""

from collections import Counter
from collections.abc import Callable

import pytest

from compiler.analysis.zero_rules import ZERO_RULES
from tests.unit.compiler.analysis.random_graphs import EMITTERS, check_graph

EVERYDAY, FULL, PARTS = 1_000, 20_000, 8
LEAST_OCCURRENCES = 50
LEAST_SHARE_WITH_ZEROS = 0.3


def run_campaign(seeds: range, record: Callable[[str, object], None]) -> None:
    keys: Counter[str] = Counter()
    with_zeros, zeros, violations = 0, 0, []
    for seed in seeds:
        outcome = check_graph(seed)
        keys += outcome.keys
        with_zeros += outcome.zeros > 0
        zeros += outcome.zeros
        violations += outcome.violations
    record("graphs", len(seeds))
    record("graphs with a proved zero", with_zeros)
    record("elements proved zero", zeros)
    record("least occurrences of a rule", min(keys[key] for key in ZERO_RULES))
    record("unsound", len(violations))
    assert violations == []
    assert {key: keys[key] for key in ZERO_RULES if keys[key] < LEAST_OCCURRENCES} == {}
    assert with_zeros >= LEAST_SHARE_WITH_ZEROS * len(seeds)


def test_it_proves_no_zero_that_is_not_one_in_a_thousand_graphs(record_property) -> None:
    run_campaign(range(EVERYDAY), record_property)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_it_proves_no_zero_that_is_not_one_in_twenty_thousand_graphs(
    part: int, record_property
) -> None:
    run_campaign(range(EVERYDAY + part, EVERYDAY + FULL, PARTS), record_property)


def test_every_rule_has_an_emitter() -> None:
    assert set(ZERO_RULES) - set(EMITTERS) == set()
