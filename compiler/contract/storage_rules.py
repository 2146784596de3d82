"""Which operand of which operation may be a weight of a given storage.

`parse_plan` asks before a device runs a plan; the kernels' loader asks the same of the records.
"""

from collections.abc import Mapping
from typing import Final

from compiler.contract.elements import LINEAR_KINDS
from compiler.contract.expert_pages import PAGE_OPS, first_expert_weight
from compiler.contract.moe_rules import expert_kinds
from compiler.contract.operations import ExpertAct, Op
from compiler.contract.plan_format import Kind

NEURON_KINDS: Final = frozenset({Kind.W4_UP_ROWS, Kind.W4_COLUMNS})


def may_read(op: Op, at: int, kind: Kind, params: Mapping[str, int | float]) -> bool:
    """Return whether `op` can read weight operand `at` from this storage.

    Args:
        op: The operation.
        at: Position among its weights.
        kind: How the weight is stored.
        params: All parameters of the call.
    """
    if kind in LINEAR_KINDS:
        return op is Op.LINEAR and at == 0
    if kind not in NEURON_KINDS:
        return True
    if op is Op.LINEAR:
        return at == 0 and kind is Kind.W4_COLUMNS
    first = first_expert_weight(op)
    if first is None or at < first:
        return False
    part = (at - first) % len(expert_kinds(int(params.get("biases", 0))))
    if kind is Kind.W4_COLUMNS:
        return part == 1
    return part == 0 and (op in PAGE_OPS or params["act"] == ExpertAct.REGLU)
