"""Every broken zero rule is noticed: it claims what is not so, or less than what is recorded.

`claims.json` holds how much the standard rules claim of the first random graphs; a rule that gets
weaker changes it. Write it anew after adding rules with
`python -m tests.unit.compiler.analysis.test_mutants` and review the diff.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from compiler.analysis.propagation import ZeroLogic
from compiler.analysis.zero_hooks import HOOKS
from compiler.analysis.zero_rules import ZERO_RULES, ZeroKind
from tests.unit.compiler.analysis.mutants import (
    BROKEN_HOOKS,
    hook_mutants,
    interface_mutants,
    row_mutants,
)
from tests.unit.compiler.analysis.random_graphs import check_graph, random_graph

GRAPHS = 240
RECORDED = Path(__file__).with_name("claims.json")

Graphs = Mapping[str | None, Sequence[int]]


@pytest.fixture(scope="module")
def claims() -> list[int]:
    return json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    """Seeds of the graphs that hold each row; all of them for no row."""
    found: dict[str | None, list[int]] = {None: list(range(GRAPHS))}
    for seed in range(GRAPHS):
        for key in random_graph(seed)[0].keys:
            found.setdefault(key, []).append(seed)
    return found


def how_it_dies(logic: ZeroLogic, seeds: Sequence[int], claims: Sequence[int]) -> str:
    """Return why the tests notice a mutant, or "alive"."""
    for seed in seeds:
        try:
            outcome = check_graph(seed, logic)
        except (ValueError, KeyError, IndexError, AssertionError, AttributeError):
            return "crash"
        if outcome.violations:
            return "unsound"
        if outcome.claims != claims[seed]:
            return "other claims"
    return "alive"


def test_the_rules_claim_what_is_recorded(claims: list[int]) -> None:
    assert [check_graph(seed).claims for seed in range(GRAPHS)] == claims


@pytest.mark.parametrize(
    ("mutants", "least"),
    [
        (row_mutants, len(ZERO_RULES)),
        (hook_mutants, len(HOOKS)),
        (interface_mutants, len(ZERO_RULES)),
    ],
)
def test_every_mutant_is_caught(
    mutants, least: int, graphs: Graphs, claims: list[int], record_property
) -> None:
    fates = {
        name: how_it_dies(logic, graphs.get(key, []), claims)
        for name, (key, logic) in mutants().items()
    }
    record_property("mutants", len(fates))
    for fate, count in sorted(Counter(fates.values()).items()):
        record_property(fate, count)
    assert [name for name, fate in fates.items() if fate == "alive"] == []
    assert len(fates) >= least
    assert Counter(fates.values())["unsound"] > 0


def test_every_hook_is_broken_at_least_once() -> None:
    assert {kind for kind, _ in BROKEN_HOOKS} == set(ZeroKind) == set(HOOKS)


def main() -> None:
    RECORDED.write_text(json.dumps([check_graph(seed).claims for seed in range(GRAPHS)]) + "\n")


if __name__ == "__main__":
    main()
