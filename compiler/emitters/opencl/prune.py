"""Launches of pruning and of the scores behind it: which tokens of a picture are kept."""

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


def attention_score(f: Frame, call: PlanCall) -> None:
    """Launch ATTENTION_SCORE: each head looks, then scores are the weighted mean of the looks."""
    q, k, y = f.required(call, 0), f.required(call, 1), f.output(call)
    heads, first, row = (int(call.params[name]) for name in ("heads", "first", "row"))
    low, high = (first, q.rows) if row < 0 else (row, row + 1)
    spaces = [f.device.space(name, heads * y.rows * _FLOAT) for name in ("scores", "looks")]
    weights = f.device.space("weights", heads * _FLOAT)
    keys = k.at.after(first * k.cols * _FLOAT)
    sizes = (q.cols, q.cols // heads, low, high, y.rows, float(call.params["scale"]))
    f.device.launch("run_looks", (heads,), q.at, keys, *spaces, weights, *sizes)
    f.device.launch("run_scores", (y.rows,), spaces[1], weights, y.at, f.status, heads, y.rows)


def prune_top_p(f: Frame, call: PlanCall) -> None:
    """Launch PRUNE_TOP_P: mark and list tokens, then write those that are kept."""
    x, score, keys = f.required(call, 0), f.required(call, 1), f.input(call, 2)
    kept, index, count = (f.output(call, at) for at in range(3))
    least, most, merge, offset = (
        int(call.params[name]) for name in ("min_keep", "max_keep", "merge", "key_offset")
    )
    mark, owner = f.device.space("taken", x.rows), f.device.space("owner", x.rows * _FLOAT)
    f.device.launch(
        "run_top_p",
        (1,),
        score.at,
        keys.at.after(offset * keys.cols * _FLOAT) if keys else f.none,
        *(mark, f.device.space("best", x.rows * _FLOAT), owner, index.at, count.at, f.status),
        *(x.rows, keys.cols if keys else 0, kept.rows, least, most, merge, keys is not None),
        float(call.params["p"]),
    )
    operands = (x.at, score.at, mark, owner, index.at, count.at, kept.at)
    f.device.launch("run_kept", (kept.rows,), *operands, x.rows, x.cols)
