"""Refuse a mixture that lacks experts which its router can choose.

Called where a mixture is repaired (`compiler.frontend.moe_repair`) and, for every mixture however
it was raised, behind the routers' pass. Experts that no router chooses are nobody's fault.
"""

from collections.abc import Set as AbstractSet
from typing import Final

from xdsl.dialects.builtin import ModuleOp

from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.types import shape_of
from compiler.errors import MissingExpertsError
from compiler.passes.base import PassContext
from compiler.passes.functions import operations
from compiler.passes.match_experts import root

CUT_HINT: Final = (
    "the stacks of the experts' weights are shorter than the router is wide: export the whole"
    " layer, or cut the router's weight with them"
)


def need_all(where: str, experts: int, present: AbstractSet[int], hint: str) -> None:
    """Check that the file holds every expert that a router can choose.

    Args:
        where: The mixture, for the message.
        experts: Rows of the router's weight.
        present: Numbers of the experts in the file.
        hint: What the submitter can do.

    Raises:
        MissingExpertsError: Some are absent; the message lists them.
    """
    missing = sorted(set(range(experts)) - present)
    if missing:
        raise MissingExpertsError(
            f"{where} chooses among {experts}, the file holds {experts - len(missing)}; missing are"
            f" {', '.join(map(str, missing))} (counted by the columns of the router's weight)",
            hint=hint,
        )


def need_chosen_experts(module: ModuleOp, ctx: PassContext) -> None:
    """Check every raised mixture whose router is raised.

    Raises:
        MissingExpertsError: A router can choose experts that its stacks do not hold.
    """
    for op in operations(module):
        if not isinstance(op, ExpertsOp):
            continue
        route = root(op.index).owner
        if isinstance(route, RouteOp):
            experts, held = (shape_of(v)[0].constant for v in (route.weight, op.w_in))
            where = f"{ctx.origins.near(op)}: the router of these experts"
            need_all(where, experts, set(range(held)), CUT_HINT)
