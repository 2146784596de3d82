"""Which nodes of the source files an operation stands for, kept through every rewriting.

    file nodes --importer--> operations --passes--> calls          (a table beside the IR, no text)

The importer numbers the nodes (`add_node`) and gives them to the operations it makes. Passes edit
through `compiler.passes.rewriting`, which reports every edit here, so that a pass needs to know
nothing of it: what takes the place of an operation stands for its nodes too (`replaced`), and an
operation that dies because its readers were replaced leaves its nodes to what replaced them
(`erased`). So a matched pattern, root and inner nodes alike, ends up at the operation that was
raised from it. After each pass `settle` finds the nodes that nothing carries any more.

At the end every node has one fate: it is in a call, it was folded at compile time, or it is dead,
with the reason. The IR's text, the plan and the bundle do not depend on any of this.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from compiler.dialects.movement import MOVEMENT_OPS
from compiler.dialects.sp import ConstantOp
from compiler.errors import printable

Sources = tuple[int, ...]
"""Numbers of nodes, ascending."""
UNNAMED: Final = "<unnamed>"
UNREAD: Final = "no result that is kept depends on it"
_SHOWN: Final = 3
_PASSIVE: Final = (ConstantOp, ReturnOp, FuncOp, ModuleOp)
"""Operations that no node is charged to on the way from a result to its operands."""


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A node of a file: component of `pipeline.json`, name, and operator with its domain."""

    component: str
    name: str
    operator: str


@dataclass(slots=True)
class Origins:
    """The table: nodes, what stands for them, and what became of the others.

    Attributes:
        nodes: All nodes of the submission by number.
        folded: Nodes whose results are constants of the program.
        dead: Nodes that nothing depends on, with the reason.
    """

    nodes: list[SourceNode] = field(default_factory=list)
    folded: set[int] = field(default_factory=set)
    dead: dict[int, str] = field(default_factory=dict)
    _of: dict[Operation, Sources] = field(default_factory=dict)
    _stead: dict[Operation, list[Operation]] = field(default_factory=dict)
    _heirs: dict[Operation, list[Operation]] = field(default_factory=dict)
    _became: dict[Operation, list[Operation]] = field(default_factory=dict)

    def add_node(self, component: str, name: str, operator: str) -> int:
        """Number a node of a file; its name is kept printable, for pictures and reports."""
        self.nodes.append(SourceNode(component, printable(name), printable(operator)))
        return len(self.nodes) - 1

    def of(self, op: Operation) -> Sources:
        """Return the nodes that `op` stands for; none for what the compiler adds by itself."""
        return self._of.get(op, ())

    def give(self, op: Operation, sources: Iterable[int]) -> None:
        """Let `op` stand for these nodes too."""
        self._of[op] = tuple(sorted({*self.of(op), *sources}))

    def copied(self, old: Operation, new: Operation) -> None:
        """Let a copy stand for the nodes of its original, which lives on or is given up whole."""
        self._of[new] = self.of(old)

    def stands(self, op: Operation, makers: Iterable[Operation]) -> None:
        """Say that `makers`, and what was made for them, do the work of `op`.

        Movement that was made along with a computation is not charged: it belongs to no node.
        """
        work = self._work([maker for maker in makers if maker is not op])
        for maker in work:
            self.give(maker, self.of(op))
        self._stead.setdefault(op, []).extend(work)
        self._bequeath(op, work)

    def replaced(self, op: Operation, values: Sequence[SSAValue]) -> None:
        """Report that `op` goes and its readers read `values`; call it before they do.

        Where an argument of the function takes its place, the readers stand for its nodes.
        """
        makers = [value.owner for value in values if isinstance(value.owner, Operation)]
        if not makers:
            makers = [use.operation for result in op.results for use in result.uses]
        self.stands(op, [maker for maker in makers if not isinstance(maker, ReturnOp)])
        self._leave(op)

    def erased(self, op: Operation) -> None:
        """Report that `op` goes because nobody reads it: what replaced its readers inherits."""
        heirs = self._living(self._stead.get(op) or self._heirs.get(op) or ())
        for heir in heirs:
            self.give(heir, self.of(op))
        self._bequeath(op, heirs)
        self._stead[op] = heirs
        self._leave(op)

    def settle(self, module: ModuleOp, why: str) -> None:
        """After a pass: find out which nodes nothing stands for any more.

        Nodes that only constants stand for are folded; those that nothing stands for any more are
        dead for the reason `why`.
        """
        present = [op for op in module.walk() if not isinstance(op, ModuleOp | FuncOp | ReturnOp)]
        carried = {n for op in present if not isinstance(op, ConstantOp) for n in self.of(op)}
        stored = {n for op in present if isinstance(op, ConstantOp) for n in self.of(op)}
        self.folded |= stored - carried - self.dead.keys()
        lost = set(range(len(self.nodes))) - carried - self.folded - self.dead.keys()
        self.dead |= dict.fromkeys(sorted(lost), why)
        self._of = {op: self.of(op) for op in present}

    def lose(self, sources: Iterable[int], why: str) -> None:
        """Declare nodes dead that were never given to an operation."""
        self.dead |= dict.fromkeys(sources, why)

    def twin(self, old: ModuleOp, new: ModuleOp) -> "Origins":
        """Return the table for a copy of a module; passes over the copy leave this one alone."""
        made = Origins(self.nodes, set(self.folded), dict(self.dead))
        for op, copy in zip(old.walk(), new.walk(), strict=True):
            if op in self._of:
                made._of[copy] = self._of[op]
        return made

    def near(self, op: Operation) -> str:
        """Return the name of the first node of `op`, or of the first operation behind it."""
        sources = self.nearest(op)
        return self.nodes[sources[0]].name if sources else UNNAMED

    def where(self, op: Operation, kind: str) -> str:
        """Return the nodes of an operation as messages name them.

        Args:
            op: The operation; if the compiler made it, the first behind it speaks for it.
            kind: What it is called if no node is known or it computes something else.
        """
        found = [self.nodes[number] for number in self.of(op)]
        if not found:
            return f"operator {kind} (node {self.near(op)})"
        shown = [f"{node.operator} (node {node.name})" for node in found[:_SHOWN]]
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"operator {' with '.join(shown)}{more}"

    def nearest(self, op: Operation) -> Sources:
        """Return the nodes of `op`, or of the first operation behind it that has any."""
        seen, queue = {op}, deque([op])
        while queue:
            current = queue.popleft()
            if self.of(current):
                return self.of(current)
            users = [use.operation for result in current.results for use in result.uses]
            queue.extend(user for user in users if user not in seen)
            seen.update(users)
        return ()

    def _work(self, makers: Sequence[Operation]) -> list[Operation]:
        """Return the new operations behind `makers` that compute; else those that move; else them.

        New is what no node and no earlier pass is known for; it is known from now on.
        """
        fresh: dict[Operation, None] = {}
        stack = list(makers)
        while stack:
            op = stack.pop()
            if op in self._of or isinstance(op, _PASSIVE):
                continue
            self._of[op] = ()
            fresh[op] = None
            stack += [v.owner for v in op.operands if isinstance(v.owner, Operation)]
        computing = [op for op in fresh if not isinstance(op, MOVEMENT_OPS)]
        return computing or list(fresh) or list(dict.fromkeys(makers))

    def _bequeath(self, op: Operation, heirs: Sequence[Operation]) -> None:
        """Let what `op` reads leave its nodes to `heirs`, should it die."""
        for value in op.operands:
            owner = value.owner
            if isinstance(owner, Operation) and owner not in heirs:
                self._heirs.setdefault(owner, []).extend(heirs)

    def _leave(self, op: Operation) -> None:
        self._became[op] = self._stead.pop(op, [])
        self._heirs.pop(op, None)
        self._of.pop(op, None)

    def _living(self, ops: Iterable[Operation]) -> list[Operation]:
        """Return operations, those that are gone replaced by what took their place."""
        found: dict[Operation, None] = {}
        seen: set[Operation] = set()
        stack = list(ops)
        while stack:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            if op in self._became:
                stack += self._became[op]
            elif op.parent is not None and not isinstance(op, ReturnOp):
                found[op] = None
        return list(found)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which nodes each call stands for, and the fate of every node; the end of the chain.

    Attributes:
        nodes: All nodes of the submission.
        calls: Per program, per call, numbers of nodes.
        folded: Nodes that are in no call because their results are known at compile time.
        dead: Nodes that are in no call because nothing depends on them, with the reason.
    """

    nodes: tuple[SourceNode, ...]
    calls: Mapping[str, tuple[Sources, ...]]
    folded: Sources
    dead: Mapping[int, str]


def provenance(origins: Origins, calls: Mapping[str, Sequence[Operation]]) -> Provenance:
    """Return the provenance of lowered programs.

    Args:
        origins: The table after the last pass.
        calls: The calls of every program, in order.
    """
    found = {name: tuple(origins.of(op) for op in ops) for name, ops in calls.items()}
    inside = {number for rows in found.values() for row in rows for number in row}
    folded = origins.folded - inside
    dead = {n: why for n, why in origins.dead.items() if n not in inside and n not in folded}
    return Provenance(
        tuple(origins.nodes), found, tuple(sorted(folded)), dict(sorted(dead.items()))
    )
