"""What became of the nodes of a submission's files, as parts of the explain document.

    Provenance --origin_facts--> facts, the same for every target --call_nodes, fates--> document

A node is in one or more calls, or folded at compile time, or dead. None of this is in the bundle.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from compiler.contract.canonical import Json
from compiler.contract.expert_pages import PAGE_OPS
from compiler.contract.plan import PlanCall

if TYPE_CHECKING:  # a compilation from the cache loads no pass
    from compiler.passes.origins import Provenance

IN_CALL: Final = "call"
FOLDED: Final = "folded"
DEAD: Final = "dead"
FATES: Final = (IN_CALL, FOLDED, DEAD)
_NAMED: Final = ("sources", "tensors", "operations")
COMPILER_MADE: Final = "added by the compiler"
_WORK: Final = (
    *("MoE", "Prune", "LSTM", "GRU", "Conv", "MatMul", "Gemm", "Attention", "TopK", "Softmax"),
    *("Norm", "Pool", "Resize", "Reduce", "Concat", "Gather", "Slice"),
)
"""Parts of operators that say what a call is about, the most telling first."""
_MOVES: Final = frozenset(
    {"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Cast", "Identity"}
)


def origin_facts(found: "Provenance") -> dict[str, Json]:
    """Return the nodes as [component, name, operator, fate, why], and those of each call."""
    folded = set(found.folded)
    rows: list[Json] = [
        [node.component, node.name, node.operator, *_fate(number, folded, found.dead)]
        for number, node in enumerate(found.nodes)
    ]
    calls: dict[str, Json] = {
        name: [list(numbers) for numbers in rows] for name, rows in found.calls.items()
    }
    return {"nodes": rows, "calls": calls}


def _fate(number: int, folded: set[int], dead: Mapping[int, str]) -> tuple[str, str]:
    if number in folded:
        return FOLDED, "its result is known when the model is compiled"
    return (DEAD, dead[number]) if number in dead else (IN_CALL, "")


def origins_of(explained: Mapping[str, Any]) -> dict[str, Json]:
    """Return the facts that an explain document was made with, to make it again."""
    steps = {op.name for op in PAGE_OPS}
    calls: dict[str, Json] = {
        name: [c.get("nodes", []) for c in program["calls"] if c["operation"] not in steps]
        for name, program in explained.get("programs", {}).items()
    }
    return {"nodes": explained.get("nodes", []), "calls": calls}


def call_nodes(
    origins: Mapping[str, Any], program: str, calls: Sequence[PlanCall]
) -> list[dict[str, Json]]:
    """Return, for each call of a program, its nodes and a line about them.

    The steps that load experts were put on the tape after the passes: they stand for no node.
    """
    nodes = origins.get("nodes", [])
    if not nodes:
        return [{"nodes": [], "source": ""} for _ in calls]
    rows = iter(origins["calls"][program])
    numbers = [[] if call.op in PAGE_OPS else list(next(rows)) for call in calls]
    return [{"nodes": row, "source": summary([nodes[n] for n in row])} for row in numbers]


def call_summaries(origins: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, by program, a line about the nodes of each call of the first module."""
    nodes = origins["nodes"]
    return {
        name: [summary([nodes[number] for number in row]) for row in rows]
        for name, rows in origins["calls"].items()
    }


def summary(nodes: Sequence[Sequence[str]]) -> str:
    """Return the most telling node of a call, and how many others it stands for."""
    if not nodes:
        return COMPILER_MADE
    _, name, operator, *_ = min(nodes, key=lambda node: _weight(node[2]))
    kind = operator.rpartition("::")[2]
    others = f" +{len(nodes) - 1}" if len(nodes) > 1 else ""
    return (name if kind.lower() in name.lower() else f"{kind} {name}") + others


def named_zeros(found: Mapping[str, Any], origins: Mapping[str, Any]) -> dict[str, Json]:
    """Return the rows about zeros, each with a `source` that says which node it is about.

    Args:
        found: Per program, lists of rows with numbers of `nodes` (`passes.pipeline`).
        origins: What `origin_facts` says.
    """
    return {
        name: {
            key: named_rows(rows, origins) if key in _NAMED else rows for key, rows in part.items()
        }
        for name, part in found.items()
    }


def named_rows(rows: Sequence[Mapping[str, Any]], origins: Mapping[str, Any]) -> list[Json]:
    """Return rows with numbers of `nodes` with a `source` beside them."""
    nodes = origins["nodes"]
    return [{**row, "source": _about(row, nodes)} for row in rows]


def _about(row: Mapping[str, Any], nodes: Sequence[Sequence[str]]) -> str:
    text = summary([nodes[number] for number in row["nodes"]])
    return f"constant of {text}" if ":sp.constant" in row.get("value", "") else text


def _weight(operator: str) -> int:
    if operator in _MOVES:
        return len(_WORK) + 1
    return next((at for at, part in enumerate(_WORK) if part in operator), len(_WORK))


def fates(origins: Mapping[str, Any]) -> list[Json]:
    """Return how many nodes of each component and operator had which fate, in file order."""
    table: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for component, _, operator, fate, _ in origins.get("nodes", []):
        table[component, operator][fate] += 1
    return [
        {"component": component, "operator": operator, **{fate: row[fate] for fate in FATES}}
        for (component, operator), row in table.items()
    ]
