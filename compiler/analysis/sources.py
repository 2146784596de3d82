"""Where zeros come from: the ten kinds of sources that the compiler looks for.

| kind | what it looks like |
|---|---|
| relu | ReLU, alone or fused into a product or a sum |
| clip | Clip whose range touches zero |
| threshold | ThresholdedRelu |
| mask | product with a truth value or with a constant that has zeros |
| where | Where that chooses zeros |
| band | causal or windowed attention, Trilu |
| softmax | softmax of what was masked with minus infinity |
| route | the best k of E experts, as `moe.route` or scattered one-hot |
| prune | kept tokens of a picture |
| product | a product with a factor that a ReLU made sparse (ReGLU, dReLU) |

Called by the pass `detect-sources`; a pure function of the analysis' facts.
"""

from typing import Final

from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.masks import DENSE
from compiler.analysis.propagation import Facts
from compiler.analysis.zero_hooks import attention_band, maps_zero, operands
from compiler.analysis.zero_rules import ZERO_RULES, ZeroKind
from compiler.dialects.invariant import zero_rule
from compiler.dialects.mm import AttentionOp

SOURCE_KINDS: Final = (
    "relu",
    "clip",
    "threshold",
    "mask",
    "where",
    "band",
    "softmax",
    "route",
    "prune",
    "product",
)
_RENAMED: Final = {"one-hot": "route", "count": "prune"}


def source_kind(op: Operation, facts: Facts, constants: ConstantTable) -> str | None:
    """Return which kind of source an operation is, or None."""
    rule = ZERO_RULES.get(zero_rule(op) or "")
    if rule is None or not op.results:
        return None
    if isinstance(op, AttentionOp):
        return "band" if attention_band(op) != DENSE else None
    if rule.kind is ZeroKind.ANNIHILATING:
        return _of_product(op, facts, constants)
    made = {_RENAMED.get(s.kind, s.kind) for s in facts.sources if _makes(op, s.value)}
    if rule.source in ("softmax", "band", "where"):
        return None if facts.of(op.results[0]).is_dense else rule.source
    if rule.kind in (ZeroKind.CAST, ZeroKind.CONSTANT):
        return None
    if rule.kind is ZeroKind.SOURCE and not maps_zero(op, constants):
        return None
    return next(iter(sorted(made)), None)


def detected_sources(
    func: FuncOp, facts: Facts, constants: ConstantTable
) -> list[tuple[Operation, str]]:
    """Return the sources of a function, in order."""
    found = ((op, source_kind(op, facts, constants)) for op in func.body.block.ops)
    return [(op, kind) for op, kind in found if kind is not None]


def _of_product(op: Operation, facts: Facts, constants: ConstantTable) -> str | None:
    if _fused_relu(op):
        return "relu"
    kinds = {source.number: source.kind for source in facts.sources}
    for value in operands(op):
        mask = facts.of(value)
        if mask.is_dense:
            continue
        named = {kinds[number] for number in mask.sources()}
        if "relu" in named:
            return "product"
        if named & {"mask", "one-hot"} or constants.get(value) is not None:
            return "mask"
    return None


def _fused_relu(op: Operation) -> bool:
    return getattr(op.properties.get("act"), "data", "") == "relu"


def _makes(op: Operation, value: SSAValue) -> bool:
    """Return whether an operation makes a source's value, or scatters by it."""
    if value.owner is op:
        return True
    return zero_rule(op) == "sp.onnx:ScatterElements" and op.operands[1] is value
