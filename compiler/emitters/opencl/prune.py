"""Launches of PRUNE and ATTENTION_ROW: which tokens of a picture are kept."""

from typing import Final

from compiler.contract.plan import PlanCall
from compiler.contract.plan_format import Status
from compiler.emitters.opencl.frame import Frame
from compiler.emitters.opencl.moves import gather

_FLOAT: Final = 4


def prune(f: Frame, call: PlanCall) -> None:
    """Launch PRUNE: choose rows, then gather them in their order."""
    x, kept, index = f.required(call, 0), f.output(call, 0), f.output(call, 1)
    score = f.required(call, 1).at.after(int(call.params["score_offset"]) * _FLOAT)
    taken = f.device.space("taken", x.rows)
    f.device.launch("run_prune", (1,), score, index.at, taken, x.rows, int(call.params["k"]))
    gather(f, x, index, kept, Status.BAD_INDEX)


def attention_row(f: Frame, call: PlanCall) -> None:
    """Launch ATTENTION_ROW; without operand k the keys are columns of q."""
    q, second, y = f.required(call, 0), f.input(call, 1), f.output(call)
    cols = int(call.params["cols"]) or q.cols
    heads, row = int(call.params["heads"]), int(call.params["row"])
    k = second or q
    keys = k.at if second else k.at.after(cols * _FLOAT)
    scores = f.device.space("scores", heads * k.rows * _FLOAT)
    sums = f.device.space("sums", heads * _FLOAT)
    sizes = (k.cols, cols // heads, k.rows, float(call.params["scale"]))
    at = q.at.after(row * q.cols * _FLOAT)
    f.device.launch("run_row_scores", (heads,), at, keys, scores, sums, *sizes)
    f.device.launch("run_row_means", (k.rows,), scores, sums, y.at, heads, k.rows)
