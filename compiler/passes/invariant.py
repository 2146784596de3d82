"""`SparsityInvariant`, held by the pass manager: no pass claims zeros that the program has not.

Before a pass the guard keeps the module's state and what is proved of its values; after a pass that
changed something, three questions are asked:

1. *declared*: is every encoding of zeros in a type proved by a fresh analysis? A call of a kernel
   stands for a value of the program before it: its type must be one that was proved there.
2. *compared*: does a value that was there before, or a result of a function, claim only zeros that
   were claimed before? Masks are compared in normal form, sources by identity.
3. *executed*: a claim that is new is not wrong yet: the program before the pass is executed on
   random inputs, and the elements that the program after it claims zero must be zero there.

Called by `compiler.passes.pipeline.run_passes`. Programs that the reference executor does not know
give no evidence for question 3; the build log then says how many claims rest on the table alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from compiler.analysis.constants import Array
from compiler.analysis.mask_moves import Environment
from compiler.analysis.masks import Mask
from compiler.analysis.module_state import FunctionState, ModuleState, rebuilt, state_of
from compiler.analysis.propagation import STANDARD, Facts, ZeroLogic
from compiler.analysis.reference import Caches, Execution, Run
from compiler.dialects.dims import Binding
from compiler.dialects.hw import CallOp
from compiler.dialects.mm import KvAppendOp
from compiler.dialects.types import dtype_of, encoding_of, shape_of, sizes_at
from compiler.errors import SparsityInvariantError
from compiler.passes.base import PassContext
from compiler.passes.functions import body, functions, return_op

LENGTHS: Final[Binding] = {"T": 2, "P": 0}
MAX_ELEMENTS: Final = 1 << 21
ROUNDS: Final = 2
TOLERANCE: Final = 1e-5
"""Of the greatest element: a pass may round differently, a false claim is larger than that."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A module before a pass.

    Attributes:
        state: What its functions were; a copy of one is made only for a claim to be executed.
        values: Every value of these functions.
        facts: Facts of the functions, by name.
    """

    state: ModuleState
    values: frozenset[SSAValue]
    facts: Mapping[str, Facts]

    def function(self, name: str) -> FunctionState | None:
        """Return the function that had this name."""
        return next((one for one in self.state if one.name == name), None)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A value after the pass that claims more than the value before the pass did."""

    before: SSAValue
    after: SSAValue
    mask: Mask


@dataclass(slots=True)
class SparsityGuard:
    """Checks one pass after the other.

    Attributes:
        logic: The rules; other than standard ones only in mutation tests.
        checks: The questions that are asked, in order.
    """

    logic: ZeroLogic = STANDARD
    checks: tuple[str, ...] = ("declared", "executed")
    unproved: int = 0
    _held: ModuleState | None = None

    def before(
        self, module: ModuleOp, ctx: PassContext, state: ModuleState | None = None
    ) -> Snapshot:
        """Remember a module; `state` is its state, if the caller has it."""
        state = state_of(module) if state is None else state
        values = frozenset(value for one in state for value in one.values())
        return Snapshot(state, values, ctx.facts.of(module, ctx.constants, self.logic, state))

    def after(
        self, module: ModuleOp, ctx: PassContext, old: Snapshot, name: str, *, exact: bool = True
    ) -> Snapshot:
        """Refuse what the pass `name` did if it claims zeros that the program before had not.

        A pass that says itself that it changes values (`exact` False) is only asked what it
        declares; it has measured its loss. A module that is what the last check accepted, whatever
        the pass says of itself, is not asked again. Returns the module as it is now.

        Raises:
            SparsityInvariantError: A claim is not proved, or an execution contradicts it.
        """
        state = state_of(module)
        if state == self._held == old.state:
            return old
        known = ctx.facts.of(module, ctx.constants, self.logic, state)
        allowed = Counter(map(_zeros, old.values))
        for func in functions(module):
            facts = known[func.sym_name.data]
            if "declared" in self.checks:
                for value in filter(_is_sparse, _values(func)):
                    is_kernel = isinstance(value.owner, CallOp)
                    if is_kernel and allowed[_zeros(value)] > 0:
                        allowed[_zeros(value)] -= 1
                    else:
                        _check_declared(value, facts, name)
            claims = list(_new_claims(func, facts, old))
            if claims and exact and "executed" in self.checks:
                self._execute(func, facts, claims, ctx, old, name)
        self._held = state
        return self.before(module, ctx, state)

    def _execute(
        self,
        func: FuncOp,
        facts: Facts,
        claims: list[_Claim],
        ctx: PassContext,
        old: Snapshot,
        name: str,
    ) -> None:
        before = old.function(func.sym_name.data)
        assert before is not None
        twin, twins = rebuilt(before)
        here = [claim for claim in claims if claim.before in twins]
        self.unproved += len(claims) - len(here)
        same_inputs = [a.type for a in body(func).args] == [a.type for a in body(twin).args]
        if not same_inputs or _too_large(func) or _too_large(twin):
            self.unproved += len(here)
            return
        for seed in range(ROUNDS):
            try:
                source = _run(twin, ctx, seed)
            except LookupError:  # no entry, or a random index outside its table: no evidence
                self.unproved += len(claims)
                return
            try:
                target = _run(func, ctx, seed)
            except KeyError:
                self.unproved += len(here)
                return
            env = _environment(facts, target)
            for claim in here:
                _check_claim(claim, source[twins[claim.before]], env, name)


def _is_sparse(value: SSAValue) -> bool:
    return bool(_zeros(value))


def _zeros(value: SSAValue) -> str:
    """Return which zeros a type declares, whatever the tensor's axes."""
    encoding = encoding_of(value) if isinstance(value.type, TensorType) else None
    if encoding is None or not encoding.is_sparse:
        return ""
    return f"{[mask.data for mask in encoding.masks.data]} {encoding.dynamic.data}"


def _check_declared(value: SSAValue, facts: Facts, name: str) -> None:
    encoding = encoding_of(value)
    assert encoding is not None
    proved = facts.proved(value)
    sources = {mask.data for mask in encoding.masks.data}
    holds = not proved.is_dense and sources <= proved.sources()
    if not holds or (proved.is_dynamic and not encoding.dynamic.data):
        raise SparsityInvariantError(
            f"after {name}, {value.owner} declares zeros of sources {sorted(sources)}"
            f" that are not proved",
            hint="the pass must drop or derive again the encoding of what it rewrites",
        )


def _new_claims(func: FuncOp, facts: Facts, old: Snapshot) -> Iterator[_Claim]:
    """Yield the values that claim zeros which they did not claim before the pass."""
    name = func.sym_name.data
    known, before_pass = old.facts.get(name), old.function(name)
    if known is None or before_pass is None:
        return
    pairs = {value: value for value in _values(func) if value in old.values}
    returned, results = tuple(return_op(func).arguments), before_pass.returned
    if len(returned) == len(results):
        pairs.update(zip(returned, results, strict=True))
    sources = {s.value: s.number for s in known.sources}
    gathers = {value: number for number, value in enumerate(known.indices)}
    for after, before in pairs.items():
        mask = facts.proved(after)
        if mask.is_dense or before not in old.values or shape_of(after) != shape_of(before):
            continue
        renamed = mask.renumbered(
            lambda n: sources.get(facts.sources[n].value, -1 - n),
            lambda n: gathers.get(facts.indices[n], -1 - n),
        )
        if not known.proved(before).implies(renamed):
            yield _Claim(before, after, mask)


def _check_claim(claim: _Claim, array: Array, env: Environment, name: str) -> None:
    dead = ~claim.mask.evaluate(env, array.shape)
    worst = float(np.abs(array[dead].astype(np.float64)).max(initial=0.0))
    scale = float(np.abs(array.astype(np.float64)).max(initial=0.0))
    if worst > TOLERANCE * max(1.0, scale):
        raise SparsityInvariantError(
            f"{name} claims zeros of {claim.after.owner}, but the program before it computes"
            f" {worst:.3g} there",
            hint="the pass changed what the program computes, or a zero rule is wrong",
        )


def _values(func: FuncOp) -> Iterator[SSAValue]:
    for op in body(func).ops:
        yield from op.results


def _too_large(func: FuncOp) -> bool:
    total = 0
    for value in _values(func):
        try:
            total += int(np.prod(sizes_at(value, LENGTHS), dtype=np.int64))
        except KeyError:
            return True
    return total > MAX_ELEMENTS


def _run(func: FuncOp, ctx: PassContext, seed: int) -> Run:
    """Execute a function on inputs that depend on the seed and the types alone."""
    rng = np.random.default_rng(seed)
    inputs = []
    for argument in body(func).args:
        make = _INPUTS.get(dtype_of(argument), _INPUTS["int32"])
        inputs.append(make(rng, sizes_at(argument, LENGTHS)))
    caches: Caches = {}
    for op in body(func).ops:
        if isinstance(op, KvAppendOp):
            shapes = [list(sizes_at(value, LENGTHS)) for value in (op.k, op.v)]
            rows = [np.zeros((*shape[:-2], 0, shape[-1]), np.float32) for shape in shapes]
            caches[op.layer.value.data] = (rows[0], rows[1])
    return Execution(ctx.constants, LENGTHS, caches).run(func, inputs)


def _environment(facts: Facts, run: Run) -> Environment:
    patterns = {
        s.number: s.pattern(run[s.value], s.width.at(LENGTHS) if s.width is not None else 0)
        for s in facts.sources
    }
    return Environment(LENGTHS, patterns, {n: run[v] for n, v in enumerate(facts.indices)})


_Maker = Callable[[np.random.Generator, tuple[int, ...]], Array]
_INPUTS: Final[Mapping[str, _Maker]] = {
    "float32": lambda rng, sizes: rng.standard_normal(sizes).astype(np.float32),
    "bool": lambda rng, sizes: rng.random(sizes) < 0.5,
    "uint8": lambda rng, sizes: rng.integers(0, 256, sizes).astype(np.uint8),
    "int32": lambda rng, sizes: rng.integers(0, 2, sizes),
}
