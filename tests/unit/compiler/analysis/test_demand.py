"""What is called unobserved is: any finite numbers may stand there and no result changes.

Random functions are run twice, the second time with every element that is not demanded replaced, in
all values at once. Broken rules are noticed: they excuse what a result observes, or excuse less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from compiler.analysis.demand_rules import DEMAND_HOOKS, DEMAND_RULES, DemandKind, whole
from compiler.analysis.finite import checked_values
from compiler.analysis.mask_moves import Environment
from compiler.analysis.masks import BOTTOM, Mask
from compiler.analysis.propagation import Facts, module_facts
from compiler.analysis.reference import Caches, Execution, Run
from compiler.analysis.zero_hooks import operands
from compiler.dialects.dims import Dim
from compiler.dialects.movement import SliceOp
from compiler.dialects.sp import BinaryOp, ConstantOp, UnaryOp
from compiler.dialects.types import dtype_of
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

GRAPHS, MUTANT_GRAPHS = 400, 300
LEAST_WITH_PARTS, LEAST_CHANGED = 200, 4_000


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


if __name__ == "__main__":
    import time
    t = time.time()
    outs = [check_demand(s) for s in range(GRAPHS)]
    print(time.time() - t, [v for o in outs for v in o.violations], sum(o.parts > 0 for o in outs), sum(o.changed for o in outs), sum(o.parts for o in outs))
