"""Which operands fit the operations that choose visual tokens; rows of `operand_rules.RULES`."""

from compiler.contract.operands import Operands, Shape, fixed, head_size, need, same, same_rows


def attention_row(c: Operands) -> None:
    """One fixed row of queries against all keys."""
    q, k, y, cols = c.source(0), c.maybe_source(1), c.result(0), c.number("cols")
    if cols == 0:
        same(q, c.source(1), "ATTENTION_ROW")
    else:
        enough = q.cols >= cols * (1 if k else 2) and (k is None or k.cols >= cols)
        need(enough, f"ATTENTION_ROW: {cols} columns of queries and keys are beyond its operands")
        same_rows(q, k or q, "ATTENTION_ROW")
    head_size(Shape(1, cols or q.cols, "f32"), c.number("heads"), "ATTENTION_ROW")
    fixed(y, q.rows, 1, "ATTENTION_ROW result")
    need(not q.dynamic and c.number("row") < q.rows, "ATTENTION_ROW needs a fixed row inside q")


def prune(c: Operands) -> None:
    """Fixed tokens, more than k, and their scores."""
    x, score, kept, index = c.source(0), c.source(1), c.result(0), c.result(1)
    k = c.number("k")
    need(
        not x.dynamic and not score.dynamic and score.cols == 1,
        "PRUNE works on fixed rows and one score column",
    )
    need(
        k <= x.rows and x.rows + c.number("score_offset") <= score.rows,
        "PRUNE: k or score_offset beyond the rows",
    )
    fixed(kept, k, x.cols, "PRUNE kept")
    fixed(index, k, 1, "PRUNE index")


def attention_score(c: Operands) -> None:
    """Queries among the rows, and a score for each row from `first` on."""
    q, k, y = c.source(0), c.source(1), c.result(0)
    row, first = c.number("row"), c.number("first")
    same(q, k, "ATTENTION_SCORE")
    head_size(q, c.number("heads"), "ATTENTION_SCORE")
    need(
        not q.dynamic and row < q.rows and first < q.rows,
        "ATTENTION_SCORE needs fixed rows, row and first among them",
    )
    fixed(y, k.rows - first, 1, "ATTENTION_SCORE result")


def prune_top_p(c: Operands) -> None:
    """Bounds inside the tokens; keys exactly when the rest is merged."""
    x, score, keys = c.source(0), c.source(1), c.maybe_source(2)
    low, high, merge = (c.number(name) for name in ("min_keep", "max_keep", "merge"))
    need(not x.dynamic, "PRUNE_TOP_P works on fixed rows")
    fixed(score, x.rows, 1, "PRUNE_TOP_P score")
    need(low <= high <= x.rows, f"PRUNE_TOP_P keeps {low} to {high} of {x.rows} rows")
    need((keys is None) == (merge == 0), "PRUNE_TOP_P takes keys to merge, and only then")
    if keys is not None:
        need(
            not keys.dynamic and x.rows + c.number("key_offset") <= keys.rows,
            "PRUNE_TOP_P needs a fixed key for every token",
        )
    rows = min(x.rows, high + merge)
    fixed(c.result(0), rows, x.cols, "PRUNE_TOP_P kept")
    fixed(c.result(1), rows, 1, "PRUNE_TOP_P index")
    fixed(c.result(2), 1, 1, "PRUNE_TOP_P count")
