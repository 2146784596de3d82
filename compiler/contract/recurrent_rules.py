"""Which operands fit RECURRENT and RECURRENT_F32; rows of `operand_rules.RULES` name the check."""

from compiler.contract.moe_rules import MAX_LINEAR_K
from compiler.contract.operands import Operands, Shape, fixed, need, vector
from compiler.contract.operations import RECURRENT_GATES, RecurrentKind


def recurrent(c: Operands) -> None:
    """Check RECURRENT: gates, states and weight of S steps of `batch` rows."""
    kind, batch = RecurrentKind(c.number("kind")), c.number("batch")
    x, y, weight = c.source(0), c.result(0), c.weight(0)
    gates, hidden = RECURRENT_GATES[kind], y.cols
    need(x.cols == gates * hidden, f"RECURRENT {kind.name} of {hidden} has {gates * hidden} gates")
    need((x.rows, x.dynamic) == (y.rows, y.dynamic), "RECURRENT has a state for every row")
    need(
        batch == 1 if x.dynamic else x.rows % batch == 0,
        f"RECURRENT: {x.rows} rows are no steps of {batch}",
    )
    need(
        (weight.rows, weight.cols) == (gates * hidden, hidden),
        f"RECURRENT weight is {weight.rows} x {weight.cols}, not {gates * hidden} x {hidden}",
    )
    need(hidden <= MAX_LINEAR_K, f"RECURRENT over {hidden} elements, at most {MAX_LINEAR_K}")
    need(
        weight.kind == "f32" or kind is not RecurrentKind.GRU_RESET_BEFORE,
        "RECURRENT resets before the product only with an f32 weight",
    )
    vector(c.maybe_weight(1), gates * hidden, "RECURRENT bias")
    is_lstm = kind is RecurrentKind.LSTM
    need(is_lstm or c.maybe_source(2) is None, "RECURRENT: only LSTM has cells")
    need(len(c.outputs) == (3 if is_lstm else 2), "RECURRENT gives states, and cells of an LSTM")
    states: list[Shape | None] = [c.maybe_source(1), c.maybe_source(2)]
    states += [c.result(at) for at in range(1, len(c.outputs))]
    for state in states:
        if state is not None:
            fixed(state, batch, hidden, "RECURRENT state")
