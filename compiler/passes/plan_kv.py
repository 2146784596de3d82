"""Plan the key/value cache: attention sink, sliding window, and a cache that never fills.

Before (`pipeline.json` says `"kv": {"sink": 4, "window": 128}`):
    %3 = "hw.call"(%q, %k, %v) <{op = "ATTENTION", params = {kv_layer = 0, ...}}>
After:
    %3 = "hw.call"(%q, %k, %v) <{op = "ATTENTION", params = {kv_layer = 0, sink = 4, window = 128,
         ...}}>

Every cached attention sees the first `sink` rows and the last `window` rows. Where a row lies is
fixed here, once: row j in slot j, and beyond the capacity C in slot `sink + (j - sink) % (C -
sink)`. C is sink + window + the most rows of one run, so that no run overwrites a row that it or a
repetition of it still sees. A window that would save nothing is left off.
"""

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import DictionaryAttr, ModuleOp

from compiler.dialects.hw import CallOp
from compiler.dialects.properties import integer
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import operations
from compiler.passes.pipeline_spec import KvWindow, PipelineSpec


@dataclass(frozen=True)
class PlanKv(Pass):
    """Give every cached attention the submission's window."""

    name: ClassVar[str] = "plan-kv"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Set the parameters; the cache's rows follow from `cache_capacity`."""
        window = window_of(ctx.spec)
        if window is None:
            return PassResult(0)
        changed = 0
        for op in operations(module):
            if isinstance(op, CallOp) and int(op.parameters().get("kv_layer", -1)) >= 0:
                seen = {"sink": integer(window.sink), "window": integer(window.window)}
                params = {**op.params.data, **seen}
                changed += params != dict(op.params.data)
                op.properties["params"] = DictionaryAttr(dict(sorted(params.items())))
        rows = f"cache of {cache_capacity(ctx.spec)} rows for {ctx.spec.max_context}"
        return PassResult(changed, (f"sink {window.sink}, window {window.window}: {rows}",))


def window_of(spec: PipelineSpec) -> KvWindow | None:
    """Return the window to use: none if the cache would not become smaller."""
    if spec.kv is None or _windowed(spec.kv, spec.max_step_tokens) >= spec.max_context:
        return None
    return spec.kv


def cache_capacity(spec: PipelineSpec, rows: int | None = None) -> int:
    """Return the rows of the cache; `rows` are the most that one run appends."""
    window = window_of(spec)
    if window is None:
        return spec.max_context
    return _windowed(window, max(rows or 0, spec.max_step_tokens))


def _windowed(kv: KvWindow, rows: int) -> int:
    return kv.sink + kv.window + rows
