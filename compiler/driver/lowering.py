"""The front half of a compilation: ONNX to a lowered module."""

from dataclasses import dataclass
from pathlib import Path

from compiler.contract.canonical import canonical_bytes
from compiler.contract.elements import WORKSPACE_BUDGET_BYTES
from compiler.driver.bounds import bounded
from compiler.driver.provenance import MASKS
from compiler.driver.stages import StageClock
from compiler.frontend.importer import import_pipeline
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits
from compiler.kernels.program import Module
from compiler.passes.origins import Provenance
from compiler.passes.pipeline import (
    LOSSLESS,
    Loss,
    LoweredPipeline,
    RaisedPipeline,
    finish_pipeline,
    raise_pipeline,
)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A submission ready for quantisation.

    Attributes:
        ir_text: Module text after each stage of the passes, under headings.
        notes: What importer and passes did, one line each.
        provenance: Which nodes of the files each call stands for, and the fate of the others.
        sparsity: Per program, what zeros are proved and what they save, as canonical JSON.
        layouts: `{"layouts": rows}` of `passes.assign_layouts.layout_rows`, as canonical JSON.
    """

    module: Module
    ir_text: str
    notes: tuple[str, ...]
    provenance: Provenance
    sparsity: str = "{}"
    layouts: str = "{}"


def lower_submission(
    directory: Path,
    clock: StageClock,
    limits: ImportLimits = DEFAULT_LIMITS,
    layout_workspace_bytes: int = WORKSPACE_BUDGET_BYTES,
    loss: Loss = LOSSLESS,
) -> Lowered:
    """Import a submission and run all passes.

    Raises:
        MalformedModelError: A file is missing, broken, or contradicts `pipeline.json`.
        UnsupportedOperatorError: A node has no kernel; operator and node are named.
        LimitError: It needs more than a limit allows; the limit and its option are named.
        CompilerError: The loss was chosen for another model.
    """
    raised = raise_submission(directory, clock, limits)
    with clock.stage("raise"), bounded(limits):
        lowered = finish_pipeline(raised, layout_workspace_bytes=layout_workspace_bytes, loss=loss)
    return _described(lowered)


def raise_submission(
    directory: Path, clock: StageClock, limits: ImportLimits = DEFAULT_LIMITS
) -> RaisedPipeline:
    """Import a submission and run the passes that say what its operations mean.

    Raises:
        UserModelError: As `lower_submission` says.
    """
    with clock.stage("import"), bounded(limits):
        imported = import_pipeline(directory, limits)
    with clock.stage("raise"), bounded(limits):
        return raise_pipeline(imported, mask_section=_masks(directory))


def _described(lowered: LoweredPipeline) -> Lowered:
    texts = [f"// ==== {stage} ====\n{text}" for stage, text in lowered.ir_text.items()]
    sparsity = canonical_bytes(dict(lowered.sparsity)).decode()
    layouts = canonical_bytes({"layouts": [dict(row) for row in lowered.layouts]}).decode()
    ir_text = "\n".join(texts)
    return Lowered(lowered.module, ir_text, lowered.notes, lowered.provenance, sparsity, layouts)


def _masks(directory: Path) -> bytes:
    path = directory / MASKS
    return path.read_bytes() if path.is_file() else b""
