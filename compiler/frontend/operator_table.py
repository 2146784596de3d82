"""Every operator of the ONNX domain: how it is compiled, or why it is refused.

`python -m compiler operators` prints it and `docs/operators.md` holds it. The table is made from
the rows that the importer and kernel selection themselves use, and from the schemas of the ONNX
package; a test keeps the page fresh and asks for a comparison with a runtime for every row that is
not refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import onnx

from compiler.frontend.control_flow import CONTROL, MAX_TRIPS
from compiler.frontend.expand_plain import MAX_STEPS
from compiler.frontend.expansions import BY_THE_STANDARD, EXPANSIONS
from compiler.frontend.onnx_file import MAX_OPSET, MIN_OPSET
from compiler.frontend.onnx_ops import OPERATORS
from compiler.frontend.refused import REFUSED, Refusal
from compiler.frontend.sequences import SEQUENCES


class How(StrEnum):
    """What becomes of an operator."""

    KERNEL = "kernel"
    MOVEMENT = "movement"
    WRITTEN_OUT = "written out"
    IMPORT = "at import"
    UNROLLED = "unrolled"
    REFUSED = "refused"


MEANINGS: Final[Mapping[How, str]] = MappingProxyType(
    {
        How.KERNEL: "computed by a kernel of its own, at the least a reference kernel",
        How.MOVEMENT: "another view of the same elements, copied only where a kernel needs it",
        How.WRITTEN_OUT: "replaced by other operators of this table while importing",
        How.IMPORT: "computed while importing, from constants and sizes; never on the device",
        How.UNROLLED: "resolved while importing: branches taken, loops repeated, lists opened",
        How.REFUSED: "a typed error that names the node, the reason and the way out",
    }
)


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator of the ONNX domain.

    Attributes:
        since: Operator set of its newest definition.
        note: What is left out, or the reason of a refusal.
        way_out: What to do instead, if it is refused or only partly there.
    """

    name: str
    since: int
    how: How
    note: str
    way_out: str


_TRIPS: Final = f"the number of trips must be known and at most {MAX_TRIPS}"
_FIXED: Final = "sizes must be fixed"
NOTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Attention": "the scores as a fourth result are refused",
        "AveragePool": "1 to 3 spatial axes",
        "BatchNormalization": "with constant statistics, not in training mode",
        "BitShift": "u8 by known amounts",
        "Cast": "to f32, integers up to 64 bits (held in 32) and bool",
        "Col2Im": "1 to 3 spatial axes",
        "Compress": "the condition must be known at import",
        "Constant": "numbers, not text or sparse tensors",
        "Conv": "1 to 3 spatial axes",
        "ConvTranspose": "1 to 3 spatial axes",
        "CumProd": f"along at most {MAX_STEPS} elements",
        "CumSum": "along a known axis",
        "DFT": _FIXED,
        "Det": "matrices up to 4 x 4",
        "Dropout": "as in inference: the operand itself",
        "Einsum": "every form, repeated indices and ellipses included",
        "GridSample": "nearest and linear in 2 and 3 dimensions, cubic in 2",
        "If": "the condition must be known at import",
        "LSTM": "the number of steps must be fixed",
        "GRU": "the number of steps must be fixed",
        "RNN": "the number of steps must be fixed",
        "Loop": _TRIPS,
        "LpPool": "without gaps and without rounding up",
        "MaxPool": "1 to 3 spatial axes; the places as a second result are refused",
        "Optional": "one that holds something",
        "Pad": "by known amounts",
        "Resize": "without tf_crop_and_resize",
        "STFT": f"with known steps and lengths; {_FIXED}",
        "ReverseSequence": "with known lengths",
        "RoiAlign": "averages of a fixed number of samples; the number of regions must be fixed",
        "Scan": _TRIPS,
        "Softmax": "along one axis",
        "SplitToSequence": "with known sizes of the parts",
        "SequenceAt": "at a known position",
        "SequenceErase": "at a known position",
        "SequenceInsert": "at a known position",
        "TopK": "k must be known",
        "Trilu": "with a known diagonal",
    }
)
"""What a supported operator leaves out; refusals of it name the node and say the same."""


def operator_table() -> tuple[OperatorRow, ...]:
    """Return every operator of the ONNX domain by name, the newest definition of each."""
    newest: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= MAX_OPSET:
            newest[schema.name] = max(newest.get(schema.name, 0), schema.since_version)
    return tuple(_row(name, since) for name, since in sorted(newest.items()))


def _row(name: str, since: int) -> OperatorRow:
    if name in OPERATORS:
        row = OPERATORS[name]
        how = {"generic": How.KERNEL, "constant": How.IMPORT}.get(row.build, How.MOVEMENT)
        how = How.KERNEL if row.build == "gather" else how
        note = "where its operands are known" if row.way_out else NOTES.get(name, "")
        return OperatorRow(name, since, how, note, row.way_out)
    if name in EXPANSIONS:
        note = NOTES.get(name, "as the standard defines it" if name in BY_THE_STANDARD else "")
        return OperatorRow(name, since, How.WRITTEN_OUT, note, "")
    if name in CONTROL or name in SEQUENCES:
        return OperatorRow(name, since, How.UNROLLED, NOTES.get(name, ""), "")
    refusal = REFUSED.get(name, Refusal("there is no row for it", ""))
    return OperatorRow(name, since, How.REFUSED, refusal.reason, refusal.way_out)


def as_markdown(rows: tuple[OperatorRow, ...]) -> str:
    """Return the table as the page `docs/operators.md`."""
    refused = sum(row.how is How.REFUSED for row in rows)
    lines = [
        "# ONNX operators",
        "",
        f"Operator sets {MIN_OPSET} to {MAX_OPSET} of the default domain: {len(rows)} operators,"
        f" {len(rows) - refused} compiled, {refused} refused.",
        "Printed by `python -m compiler operators --markdown`; a test keeps this page fresh.",
        "",
        "| how | meaning |",
        "|---|---|",
        *(f"| {how} | {meaning} |" for how, meaning in MEANINGS.items()),
        "",
        "| operator | since | how | limits, or why not | way out |",
        "|---|---|---|---|---|",
        *(f"| {row.name} | {row.since} | {row.how} | {row.note} | {row.way_out} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
