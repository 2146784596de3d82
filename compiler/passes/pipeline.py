"""The passes in the order in which they run. A pass is registered by standing in this list."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.exceptions import VerifyException

from compiler.analysis.demand import demand_rows, function_demands
from compiler.analysis.savings import sparsity_rows
from compiler.contract.elements import WORKSPACE_BUDGET_BYTES
from compiler.dialects.text import print_module
from compiler.kernels.program import KvKind, Module, ProgramError
from compiler.passes.adapt_pruning import AdaptPruning
from compiler.passes.assign_layouts import AssignLayouts, layout_rows
from compiler.passes.base import ImportedPipeline, Pass, PassContext
from compiler.passes.canonicalise import Canonicalise
from compiler.passes.check_zeros import CheckZeros
from compiler.passes.compose import Compose
from compiler.passes.decompose_moe import DecomposeMoe
from compiler.passes.derive_structure import DeriveStructure
from compiler.passes.detect_sources import DetectSources
from compiler.passes.drop_dead_channels import DropDeadChannels
from compiler.passes.drop_dead_heads import DropDeadHeads
from compiler.passes.fold_affine import FoldAffine
from compiler.passes.functions import functions
from compiler.passes.fuse_groups import FuseGroups
from compiler.passes.inject_masks import InjectMasks
from compiler.passes.invariant import SparsityGuard
from compiler.passes.last_row import LastRow
from compiler.passes.lower import calls_of, lower
from compiler.passes.merge_adapters import MergeAdapters
from compiler.passes.origins import UNREAD, Origins, Provenance, provenance
from compiler.passes.plan_kv import PlanKv
from compiler.passes.propagate_masks import PropagateMasks
from compiler.passes.raise_attention import RaiseAttention
from compiler.passes.raise_cache import RaiseCache
from compiler.passes.raise_conv import RaiseConv
from compiler.passes.raise_elementwise import RaiseElementwise
from compiler.passes.raise_int8 import RaiseInt8
from compiler.passes.raise_linear import RaiseLinear
from compiler.passes.raise_moe_contrib import RaiseMoeContrib
from compiler.passes.raise_moe_experts import RaiseMoeExperts
from compiler.passes.raise_moe_native import RaiseMoeNative
from compiler.passes.raise_moe_router import RaiseMoeRouter
from compiler.passes.raise_norm import RaiseNorm
from compiler.passes.raise_prune import RaisePrune
from compiler.passes.raise_rope import RaiseRope
from compiler.passes.remove_columns import Removal, RemoveColumns
from compiler.passes.select_kernels import SelectKernels
from compiler.passes.sink_layouts import SinkLayouts

RAISING: Final[tuple[Pass, ...]] = (
    Canonicalise(),
    FoldAffine(),
    RaiseNorm(),
    RaiseInt8(),
    RaiseLinear(),
    RaiseRope(),
    RaiseMoeNative(),
    RaiseMoeContrib(),
    RaiseMoeExperts(),
    RaiseMoeRouter(),
    RaiseAttention(),
    RaiseCache(),
    RaisePrune(),
    RaiseConv(),
    RaiseElementwise(),
    SinkLayouts(),
    DropDeadChannels(),
    Canonicalise(),
    DropDeadHeads(),
)
REMOVING: Final[tuple[Pass, ...]] = (
    RemoveColumns(),
    DropDeadChannels(),
    DropDeadHeads(),
)
"""Lossy; a compilation runs them only if it is told what to remove."""
COMPOSING: Final[tuple[Pass, ...]] = (
    AdaptPruning(),
    Compose(),
    LastRow(),
    Canonicalise(),
    DetectSources(),
    PropagateMasks(),
    DeriveStructure(),
)
SELECTING: Final[tuple[Pass, ...]] = (
    SelectKernels(),
    MergeAdapters(),
    PlanKv(),
    FuseGroups(),
    AssignLayouts(),
    CheckZeros(),
)

OPTIONAL: Final[tuple[Pass, ...]] = (DecomposeMoe(),)
"""Passes that planners and tools run; a compilation does not."""

LOSSY_TILES: Final = ("16x32",)
"""What kernels skip: the tile of the layout `tiles`."""
LEAST_ZEROS: Final = 0.25
"""The share of zeros from which on a weight has a pattern to round."""

STAGES: Final[Mapping[str, tuple[Pass, ...]]] = MappingProxyType(
    {
        "imported": (InjectMasks(),),
        "raised": RAISING,
        "removed": REMOVING,
        "programs": COMPOSING,
        "kernels": SELECTING,
    }
)

_FIRST: Final = ("imported", "raised")


@dataclass(frozen=True, slots=True)
class LoweredPipeline:
    """A submission ready for code generation.

    Attributes:
        module: Programs, buffers, weights, cache.
        ir_text: Module text after each stage (`imported`, `raised`, `programs`, `kernels`; also
            `removed` if something was).
        notes: What the passes did, one line each.
        sparsity: Per program, what zeros are proved and what they save (`analysis.savings`).
        provenance: Which nodes of the files each call stands for.
        layouts: What each weight with zeros costs in each layout (`assign_layouts.layout_rows`).
    """

    module: Module
    ir_text: Mapping[str, str]
    notes: tuple[str, ...]
    sparsity: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=lambda: provenance(Origins(), {}))
    layouts: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class RaisedPipeline:
    """A submission whose operations say what they mean, before programs are composed.

    Attributes:
        module: One function per component.
        ctx: What passes may use besides the module.
        ir_text: Module text after each stage so far.
        notes: What importer and passes did so far, one line each.
    """

    module: ModuleOp
    ctx: PassContext
    ir_text: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """What may change in values: nothing by default.

    Attributes:
        removals: Columns that go (`compiler.passes.remove_columns`).
        structure: The greatest relative loss of a weight whose pattern of zeros is rounded to
            tiles (`compiler.passes.derive_structure`).
        kv: How keys and values are stored between runs.
    """

    removals: tuple[Removal, ...] = ()
    structure: float = 0.0
    kv: KvKind = KvKind.F32


LOSSLESS: Final = Loss()


def lower_pipeline(
    imported: ImportedPipeline,
    *,
    verify: bool = False,
    fuse: bool = True,
    mask_section: bytes = b"",
    leave_out: Collection[str] = (),
    layout_workspace_bytes: int = WORKSPACE_BUDGET_BYTES,
    loss: Loss = LOSSLESS,
) -> LoweredPipeline:
    """Run all passes on a copy of the imported module and lower it.

    Args:
        imported: What `compiler.frontend.import_pipeline` returned; it is not changed.
        verify: Run the IR verifier after each pass, not only after each stage.
        fuse: Whether calls are fused; without it the plan has the same bits in more calls.
        mask_section: Masks of weights (`compiler.passes.inject_masks`); empty for none.
        leave_out: Names of passes that do not run, to measure what they bring.
        layout_workspace_bytes: The most workspace that a layout of a weight may need.
        loss: What may change in values.

    Raises:
        SparsityInvariantError: A pass claims zeros that the program before it has not.
        UnsupportedOperatorError: A node has no kernel where it stands; operator and node are named.
        MalformedModelError: Components contradict each other or their roles.
        CompilerError: A removal does not fit the module.
    """
    raised = raise_pipeline(imported, verify=verify, mask_section=mask_section, leave_out=leave_out)
    return finish_pipeline(
        raised,
        verify=verify,
        fuse=fuse,
        leave_out=leave_out,
        layout_workspace_bytes=layout_workspace_bytes,
        loss=loss,
    )


def raise_pipeline(
    imported: ImportedPipeline,
    *,
    verify: bool = False,
    mask_section: bytes = b"",
    leave_out: Collection[str] = (),
) -> RaisedPipeline:
    """Run the first stages on a copy of the imported module; see `lower_pipeline`."""
    module, ctx = _copy(imported.module, imported.context())
    notes, texts, guard = list(imported.notes), dict[str, str](), SparsityGuard()
    for stage in _FIRST:
        wanted = [p for p in STAGES[stage] if p.name not in leave_out]
        chosen = [_configured(p, mask_section, LOSSLESS, 0) for p in wanted]
        notes.extend(run_passes(module, ctx, chosen, verify=verify, guard=guard))
        _verify(module, stage)
        texts[stage] = print_module(module)
    return RaisedPipeline(module, ctx, MappingProxyType(texts), tuple(notes))


def finish_pipeline(
    raised: RaisedPipeline,
    *,
    verify: bool = False,
    fuse: bool = True,
    leave_out: Collection[str] = (),
    layout_workspace_bytes: int = WORKSPACE_BUDGET_BYTES,
    loss: Loss = LOSSLESS,
) -> LoweredPipeline:
    """Run the other stages on a copy of the raised module; see `lower_pipeline`."""
    module, ctx = _copy(raised.module, raised.ctx)
    notes, texts, guard = list(raised.notes), dict(raised.ir_text), SparsityGuard()
    sparsity: dict[str, Any] = {}
    for stage, passes in STAGES.items():
        if stage in _FIRST or (stage == "removed" and not loss.removals):
            continue
        wanted = [p for p in passes if p.name not in leave_out and _is_asked(p, ctx, fuse)]
        chosen = [_configured(p, b"", loss, layout_workspace_bytes) for p in wanted]
        notes.extend(run_passes(module, ctx, chosen, verify=verify, guard=guard))
        _verify(module, stage)
        texts[stage] = print_module(module)
        if stage == "programs":
            sparsity = _sparsity(module, ctx)
    layouts = layout_rows(module, ctx, layout_workspace_bytes)
    lowered = lower(module, ctx, loss.kv)
    origins = provenance(ctx.origins, {f.sym_name.data: calls_of(f) for f in functions(module)})
    return LoweredPipeline(
        lowered, MappingProxyType(texts), tuple(notes), sparsity, origins, layouts
    )


def _configured(
    current: Pass, mask_section: bytes, loss: Loss, layout_workspace_bytes: int
) -> Pass:
    match current:
        case InjectMasks():
            return InjectMasks(mask_section)
        case AssignLayouts():
            return AssignLayouts(layout_workspace_bytes)
        case RemoveColumns():
            return RemoveColumns(loss.removals)
        case DeriveStructure() if loss.structure:
            return replace(
                current, budget=loss.structure, lossy=LOSSY_TILES, least_zeros=LEAST_ZEROS
            )
        case _:
            return current


def _is_asked(current: Pass, ctx: PassContext, fuse: bool) -> bool:
    """Return whether a pass runs, of those that a caller or a submission chooses."""
    if isinstance(current, MergeAdapters):
        return ctx.spec.merge_adapters
    return fuse or not isinstance(current, FuseGroups)


def _sparsity(module: ModuleOp, ctx: PassContext) -> dict[str, Any]:
    """Return what is proved of each program when its operations still say what they mean."""
    facts = ctx.facts.of(module, ctx.constants)
    return {
        (name := func.sym_name.data): {
            **sparsity_rows(func, facts[name], ctx.constants, ctx.origins.nearest),
            "demanded": demand_rows(func, function_demands(func, facts[name], ctx.constants)),
        }
        for func in functions(module)
    }


def run_passes(
    module: ModuleOp,
    ctx: PassContext,
    passes: Sequence[Pass],
    *,
    verify: bool = False,
    guard: SparsityGuard | None = None,
) -> list[str]:
    """Run passes in order on `module`; return one note per pass.

    Args:
        module: The module, rewritten in place.
        ctx: What passes may use.
        passes: What to run.
        verify: Run the IR verifier after each pass.
        guard: What checked this module after its passes so far; None for a new one.

    Raises:
        SparsityInvariantError: A pass claims zeros that the program before it has not.
    """
    notes, guard = [], guard or SparsityGuard()
    unproved = guard.unproved
    old = guard.before(module, ctx)
    for current in passes:
        result = current.run(module, ctx)
        ctx.origins.settle(module, f"{UNREAD}, {current.name} found")
        exact = not current.changes_values
        old = guard.after(module, ctx, old, current.name, exact=exact)
        if verify:
            _verify(module, current.name)
        notes.append("; ".join((f"{current.name}: {result.changed}", *result.notes)))
    if claims := guard.unproved - unproved:
        notes.append(f"sparsity-invariant: {claims} claims rest on the zero rules alone")
    return notes


def _verify(module: ModuleOp, after: str) -> None:
    try:
        module.verify()
    except VerifyException as error:
        reason = str(error).strip().splitlines()[-1]
        raise ProgramError(f"after {after} the module is invalid: {reason}") from error


def _copy(module: ModuleOp, ctx: PassContext) -> tuple[ModuleOp, PassContext]:
    copy = module.clone()
    return copy, PassContext(ctx.spec, ctx.constants, ctx.origins.twin(module, copy))
