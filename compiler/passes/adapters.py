"""Which weights belong to adapters (LoRA) that the file keeps beside the weights they change.

    y = x W^T + scale * (x A^T) B^T        A (r, K), B (N, r), r less than K and N

    %h = "hw.call"(%x, %A) <{op = "LINEAR_F32"}>      %u = "hw.call"(%h, %B) <{op = "LINEAR_F32"}>
    %s = "hw.call"(%u, %scale) <{op = "MUL"}>         %y = "hw.call"(%x, %s, %W) <{op = "LINEAR"}>

`merge_adapters` merges branches into W if the submission asks for it; nothing else does, for their
product is never a constant. `lower` asks here and puts A and B of what is left into sections of
their own, `adapter.<n>`, so that an update of the adapter leaves every other section as it is, bit
for bit. The first branch beside a weight is adapter 0, the next adapter 1.
Left out: branches with a bias or an activation, which are layers and no adapters.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from compiler.contract.operations import LINEARS, Act, Op
from compiler.dialects.hw import CallOp
from compiler.dialects.sp import ConstantOp
from compiler.dialects.types import shape_of
from compiler.passes.functions import operations
from compiler.passes.horizontal import digest_of

ADAPTER_SECTION: Final = "adapter."
_LINEARS: Final = frozenset(op.name for op in LINEARS)
SUMS: Final = frozenset({Op.ADD.name})
SCALES: Final = frozenset({Op.MUL.name, Op.DIV.name})


def adapter_sections(module: ModuleOp) -> Mapping[str, str]:
    """Return the section of every adapter's weight, by the content of the weight.

    A weight that something else reads too has no section of its own.
    """
    sections: dict[str, str] = {}
    readers = Counter(digest for call in _calls(module) for digest in _digests(call))
    beside: Counter[str] = Counter()
    numbers: dict[tuple[str, str], int] = {}
    used: Counter[str] = Counter()
    for down in _calls(module):
        up = second_of(down)
        base = _base(down, up) if up is not None else None
        if up is None or base is None:
            continue
        pair = (digest_of(down), digest_of(up))
        if pair not in numbers:
            numbers[pair] = beside[digest_of(base)]
            beside[digest_of(base)] += 1
        for digest in pair:
            sections[digest] = f"{ADAPTER_SECTION}{numbers[pair]}"
            used[digest] += 1
    return {digest: name for digest, name in sections.items() if used[digest] == readers[digest]}


def _calls(module: ModuleOp) -> Iterator[CallOp]:
    return (op for op in operations(module) if isinstance(op, CallOp))


def _digests(call: CallOp) -> list[str]:
    return [w.owner.sha256.data for w in call.weights if isinstance(w.owner, ConstantOp)]


def _sizes(linear: CallOp) -> tuple[int, int]:
    """Return (N, K) of a linear layer."""
    weight = linear.weight(0)
    assert weight is not None
    rows, cols = shape_of(weight)
    return rows.constant, cols.constant


def _is_plain(call: object) -> bool:
    """Return whether a call is a linear layer without bias and activation."""
    if not isinstance(call, CallOp) or call.op.data not in _LINEARS:
        return False
    return call.weight(1) is None and int(call.parameters().get("act", Act.NONE)) == Act.NONE


def only_reader(value: SSAValue) -> CallOp | None:
    """Return the call that reads a value, if exactly one does, once."""
    uses = list(value.uses)
    reader = uses[0].operation if len(uses) == 1 else None
    return reader if isinstance(reader, CallOp) else None


def second_of(down: CallOp) -> CallOp | None:
    """Return the linear layer that alone reads `down`, if the two narrow and widen again."""
    if not _is_plain(down) or down.argument(1) is not None:
        return None
    up = only_reader(down.outputs[0])
    if up is None or not _is_plain(up) or up.argument(0) is not down.outputs[0]:
        return None
    rank, width = _sizes(down)
    return up if rank < width and rank < _sizes(up)[0] else None


def _base(down: CallOp, up: CallOp) -> CallOp | None:
    """Return the layer of the same input whose result the branch is added to."""
    candidates = [up.argument(1), *_partners(up.outputs[0])]
    for value in candidates:
        for linear in _terms(value):
            same = linear.argument(0) is down.argument(0)
            if same and _sizes(linear) == (_sizes(up)[0], _sizes(down)[1]):
                return linear
    return None


def _partners(value: SSAValue) -> list[SSAValue | None]:
    """Return what `value`, scaled or not, is added to; the sum itself if a layer does it."""
    reader = only_reader(value)
    while reader is not None and reader.op.data in SCALES:
        value = reader.outputs[0]
        reader = only_reader(value)
    if reader is None:
        return []
    if reader.op.data in SUMS:
        return [reader.argument(0), reader.argument(1)]
    is_sum = reader.op.data in _LINEARS and reader.argument(1) is value
    return [reader.outputs[0]] if is_sum else []


def _terms(value: SSAValue | None) -> Iterator[CallOp]:
    """Yield the linear layers whose results add up to `value`."""
    call = value.owner if value is not None else None
    while isinstance(call, CallOp) and call.op.data in _LINEARS:
        yield call
        rest = call.argument(1)
        call = rest.owner if rest is not None else None
    if isinstance(call, CallOp) and call.op.data in SUMS:
        for at in (0, 1):
            yield from _terms(call.argument(at))
