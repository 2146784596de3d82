"""What is called unobserved is: any finite numbers may stand there and no result changes.

Random functions are run twice, the second time with every element that is not demanded replaced, in
all values at once. Broken rules are noticed: they excuse what a result observes, or excuse less.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from compiler.analysis.demand import (
    STANDARD_DEMAND,
    DemandLogic,
    Demands,
    demand_rows,
    function_demands,
)
from compiler.analysis.demand_rules import DEMAND_HOOKS, DEMAND_RULES, DemandKind
from compiler.analysis.finite import checked_values
from compiler.analysis.mask_moves import Environment
from compiler.analysis.masks import BOTTOM, Mask
from compiler.analysis.propagation import Facts, module_facts
from compiler.analysis.reference import Caches, Execution, Run
from compiler.analysis.zero_rules import ZERO_RULES
from compiler.dialects.dims import Dim
from compiler.dialects.mm import KvAppendOp
from compiler.dialects.movement import SliceOp
from compiler.dialects.sp import BinaryOp, ConstantOp, LinearOp, UnaryOp
from compiler.dialects.types import dtype_of, shape_of
from tests.unit.compiler.analysis.demand_mutants import (
    BROKEN_HOOKS,
    greedy_rows,
    hook_mutants,
    timid_rows,
)
from tests.unit.compiler.analysis.random_graphs import (
    EMITTERS,
    OPERATIONS_PER_GRAPH,
    ROWS,
    STATIC_ONLY,
    WIDTH,
    Graph,
    environment,
    random_inputs,
)

GRAPHS, MUTANT_GRAPHS = 400, 240
LEAST_WITH_PARTS, LEAST_CHANGED = 250, 100_000
SHOWN_TRUTHS = (311, 371, 457, 1047)
"""Graphs in which a result depends on a comparison that few graphs show."""
FULL_ANYWAY = "row mm.kv_append"
"""The rule that already demands everything."""


def graph_of(seed: int) -> tuple[Graph, FuncOp]:
    """Return a random function whose result shows some rows and columns of its last values."""
    graph = Graph(seed)
    keys = sorted(k for k in EMITTERS if not (graph.symbolic and k in STATIC_ONLY))
    for _ in range(OPERATIONS_PER_GRAPH):
        EMITTERS[keys[int(graph.rng.integers(len(keys)))]](graph)
    value = graph.add(BinaryOp(graph.floats[-1], graph.floats[-2], kind="add"))
    if not graph.symbolic and graph.rng.random() < 0.5:
        value = graph.add(SliceOp(value, 0, Dim(int(graph.rng.integers(ROWS))), Dim(1)))
    if graph.rng.random() < 0.5:
        value = graph.add(SliceOp(value, 1, Dim(int(graph.rng.integers(WIDTH - 1))), Dim(2)))
    graph.floats.append(value)
    return graph, graph.finish()


@dataclass
class Outcome:
    """What was called unobserved in one graph, and what was not.

    Attributes:
        changed: Elements replaced, over all executions.
        parts: Values of which a part was replaced, and a part not.
        violations: Executions whose results changed.
    """

    changed: int = 0
    parts: int = 0
    violations: list[str] = field(default_factory=list)


class Noise(dict[SSAValue, np.ndarray]):
    """Overrides that keep what is computed where it is demanded."""

    def __init__(self, places: Mapping[SSAValue, np.ndarray], rng: np.random.Generator) -> None:
        super().__init__(places)
        self.rng = rng

    def get(self, value: SSAValue, array: np.ndarray) -> np.ndarray:  # type: ignore[override]
        dead = super().get(value)
        if dead is None:
            return array
        if array.dtype == np.bool_:
            return array ^ dead
        other = np.float32(3) * self.rng.standard_normal(array.shape).astype(np.float32)
        return np.where(dead, other, array).astype(array.dtype)


@dataclass
class Twin:
    """Two executions of one function on the same inputs and cache."""

    graph: Graph
    func: FuncOp
    facts: Facts
    demands: Demands
    inputs: list[np.ndarray]
    caches: Caches

    def run(self, places: Mapping[SSAValue, np.ndarray], seed: int) -> tuple[Run, Caches]:
        """Run with other finite numbers at `places`, as each value is computed."""
        execution = Execution(self.graph.table, {"T": ROWS, "P": 0}, self.caches)
        noise = Noise(places, np.random.default_rng(seed))
        return execution.run(self.func, self.inputs, noise), execution.caches

    def unobserved(self, run: Run, not_finite: set[int]) -> dict[SSAValue, np.ndarray]:
        """Return where each value may be replaced, if assumptions in `not_finite` fail."""
        plain = Execution(self.graph.table, {"T": ROWS, "P": 0}, self.caches)
        env = environment(self.facts, run, plain)
        indices = {number: run[value] for number, value in enumerate(self.demands.indices)}
        env = Environment(env.binding, env.patterns, indices)
        found = {}
        for value, array in run.items():
            if isinstance(value.owner, ConstantOp) or dtype_of(value)[:5] not in ("float", "bool"):
                continue
            clauses = self.demands.of(value).clauses
            holding = Mask(frozenset(c for c in clauses if not c.assumes & not_finite))
            dead = ~holding.evaluate(env, array.shape)
            if dead.any():
                found[value] = dead
        return found


def infinite(numbers: Sequence[SSAValue], *runs: Run) -> set[int]:
    return {
        number
        for number, value in enumerate(numbers)
        if not all(np.isfinite(run[value].astype(np.float64)).all() for run in runs)
    }


def check_demand(seed: int, logic: DemandLogic = STANDARD_DEMAND) -> Outcome:
    """Execute a random function with and without what its results cannot observe."""
    graph, func = graph_of(seed)
    facts = module_facts([func], graph.table)[0]
    demands = function_demands(func, facts, graph.table, logic)
    outcome, checked = Outcome(), checked_values([func])
    rng = np.random.default_rng([seed, 2])
    caches: Caches = {k: (np.zeros((0, WIDTH), np.float32),) * 2 for k in range(graph.layers)}
    for hostile in (False, False, True):
        inputs = random_inputs(rng, hostile=hostile)
        twin = Twin(graph, func, facts, demands, inputs, caches)
        plain, kept = twin.run({}, seed)
        if infinite(checked, plain):
            continue
        broken = infinite(demands.numbers, plain)
        while True:
            places = twin.unobserved(plain, broken)
            other, kept_too = twin.run(places, seed)
            more = broken | infinite(demands.numbers, other)
            if more == broken:
                break
            broken = more
        if infinite(checked, other):
            continue
        outcome.changed += sum(int(dead.sum()) for dead in places.values())
        outcome.parts += sum(not dead.all() for dead in places.values())
        pairs = [(plain[value], other[value]) for value in func.body.block.last_op.operands]
        pairs += [pair for k in kept for pair in zip(kept[k], kept_too[k], strict=True)]
        if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            outcome.violations.append(f"seed {seed}")
    return outcome


def test_no_result_observes_what_is_not_demanded() -> None:
    outcomes = [check_demand(seed) for seed in range(GRAPHS)]
    assert [v for outcome in outcomes for v in outcome.violations] == []
    assert sum(outcome.parts > 0 for outcome in outcomes) >= LEAST_WITH_PARTS
    assert sum(outcome.changed for outcome in outcomes) >= LEAST_CHANGED


Graphs = Mapping[str, Sequence[int]]


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    """Seeds of the graphs that hold each row."""
    found: dict[str, list[int]] = {}
    for seed in (*range(MUTANT_GRAPHS), *SHOWN_TRUTHS):
        for key in graph_of(seed)[0].keys:
            found.setdefault(key, []).append(seed)
    return found


@cache
def plain_outcome(seed: int) -> Outcome:
    return check_demand(seed)


def how_it_dies(logic: DemandLogic, seeds: Sequence[int], *, timid: bool) -> str:
    """Return why the tests notice a mutant, or "alive"."""
    for seed in seeds:
        try:
            outcome = check_demand(seed, logic)
        except (ValueError, KeyError, IndexError, AssertionError, AttributeError):
            return "crash"
        if outcome.violations:
            return "unsound"
        if timid and outcome.changed < plain_outcome(seed).changed:
            return "fewer claims"
    return "alive"


@pytest.mark.parametrize(
    ("mutants", "timid", "fate"),
    [
        (hook_mutants, False, "unsound"),
        (greedy_rows, False, "unsound"),
        (timid_rows, True, "fewer claims"),
    ],
)
def test_every_mutant_is_caught(
    mutants, timid: bool, fate: str, graphs: Graphs, record_property
) -> None:
    fates = {
        name: how_it_dies(
            logic, sorted({s for key in keys for s in graphs.get(key, ())}), timid=timid
        )
        for name, (keys, logic) in mutants().items()
        if not (timid and name.startswith(FULL_ANYWAY))
    }
    record_property("mutants", len(fates))
    for way, count in sorted(Counter(fates.values()).items()):
        record_property(way, count)
    assert [name for name, found in fates.items() if found == "alive"] == []
    assert set(fates.values()) <= {fate, "crash"}
    assert sum(found == fate for found in fates.values()) >= 0.9 * len(fates)


def test_every_rule_has_an_emitter_and_every_hook_is_broken() -> None:
    assert set(DEMAND_RULES) - set(EMITTERS) == set()
    assert {kind for kind, _ in BROKEN_HOOKS} == set(DemandKind) == set(DEMAND_HOOKS)
    assert set(DEMAND_RULES) <= set(ZERO_RULES)


def demands_of(graph: Graph, result: SSAValue) -> tuple[FuncOp, Demands]:
    graph.floats.append(result)
    func = graph.finish()
    facts = module_facts([func], graph.table)[0]
    return func, function_demands(func, facts, graph.table)


def static_graph() -> Graph:
    return next(graph for seed in range(50) if not (graph := Graph(seed)).symbolic)


def bits(demands: Demands, value: SSAValue) -> list[list[int]]:
    shape = tuple(dim.constant for dim in shape_of(value))
    return demands.of(value).evaluate(Environment(), shape).astype(int).tolist()


def test_a_last_row_demands_one_row_of_everything_before_it() -> None:
    g = static_graph()
    x, weight = g.floats[0], g.constant(np.ones((WIDTH, WIDTH), np.float32))
    y = g.add(LinearOp(x, weight, None, None, act="none", storage="w4"))
    _, demands = demands_of(g, g.add(SliceOp(y, 0, Dim(ROWS - 1), Dim(1))))
    assert bits(demands, y) == bits(demands, x) == [[0] * 4, [0] * 4, [1] * 4]


@pytest.mark.parametrize(("storage", "column"), [("f32", 0), ("w4", 1)])
def test_zero_weights_excuse_columns_unless_rows_are_scaled(storage: str, column: int) -> None:
    g = static_graph()
    matrix = np.ones((WIDTH, WIDTH), np.float32)
    matrix[:, 2] = 0
    y = LinearOp(g.floats[0], g.constant(matrix), None, None, act="none", storage=storage)
    _, demands = demands_of(g, g.add(y))
    assert bits(demands, g.floats[0]) == [[1, 1, column, 1]] * ROWS


def test_a_zero_excuses_the_other_factor_and_never_itself() -> None:
    g = static_graph()
    zero = g.constant(np.array([[1, 0, 0, 1]], np.float32))
    z = g.add(BinaryOp(g.floats[0], zero, kind="mul"))
    square = g.add(BinaryOp(z, z, kind="mul"))
    _, demands = demands_of(g, square)
    assert demands.of(z).is_dense
    assert bits(demands, g.floats[0]) == [[1, 0, 0, 1]] * ROWS


def test_a_quotient_must_be_finite_because_it_tells_zeros_apart() -> None:
    g = static_graph()
    zero = g.constant(np.array([[1, 0, 0, 1]], np.float32))
    product = g.add(BinaryOp(g.floats[0], zero, kind="mul"))
    quotient = g.add(UnaryOp(product, kind="reciprocal"))
    _, demands = demands_of(g, quotient)
    (clause,) = demands.of(g.floats[0]).clauses
    assumed = [demands.numbers[number] for number in clause.assumes]
    assert any(value is quotient for value in assumed)
    assert any(value is g.floats[0] for value in assumed)


def test_the_cache_observes_what_no_result_shows() -> None:
    g = static_graph()
    op = KvAppendOp(g.floats[0], g.floats[1], layer=0, heads=2)
    g.add(op)
    _, demands = demands_of(g, g.constant(np.ones((ROWS, WIDTH), np.float32)))
    assert demands.of(g.floats[0]).is_dense
    assert demands.of(op.values) == BOTTOM


def test_it_reports_the_demanded_density_of_each_value() -> None:
    g = static_graph()
    y = g.add(UnaryOp(g.floats[0], kind="tanh"))
    func, demands = demands_of(g, g.add(SliceOp(y, 1, Dim(1), Dim(1))))
    (row,) = demand_rows(func, demands, {})
    assert row["value"].endswith("sp.unary#0")
    assert (row["level"], row["demanded_high"]) == ("static", 0.25)
    assert (row["elements"], row["unobserved"]) == (ROWS * WIDTH, ROWS * (WIDTH - 1))
    assert row["if_finite"] is False
