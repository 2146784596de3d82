"""What a compilation is asked for, and what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from compiler.contract.elements import WORKSPACE_BUDGET_BYTES
from compiler.contract.manifest import (
    MAX_RELEASE_SEQ,
    MAX_SECURITY_EPOCH,
    NAME_PATTERN,
    ReleaseManifest,
)
from compiler.contract.plan_format import KvKind
from compiler.contract.planes import Plane
from compiler.contract.selftest import MIN_VECTORS
from compiler.driver.cache import DEFAULT_LIMIT_BYTES
from compiler.driver.gain import AnswerScores
from compiler.errors import UsageError
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits

STAGES: Final = ("import", "raise", "quantise", "plan", "kernels", "selftest", "manifest")
Progress = Callable[[str, float], None]


def no_progress(stage: str, fraction: float) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Everything that `compile_model` may depend on besides the submission.

    Attributes:
        target: Id of the target, see `compiler.hardware.targets`.
        model, version, release_seq, security_epoch: Identity of the release, for the manifest.
        cache_dir: Where stage results are kept between runs; None keeps nothing.
        cache_limit_bytes: What is kept there at most; what was used longest ago goes first.
        recheck: Run the native self-test even if the very same bytes passed it on this machine.
        base_sections: Sections of an older bundle of the same model (`plan` and those with
            weights); its W4 grids are kept wherever weights still fit them, so that deltas are
            small.
        base_planes: Planes of those sections, as the older manifest gives them; checked against
            the base plan.
        base_answers: Scores of that bundle, from the report of its build; what the new version
            gains over it must survive quantisation (`compiler.driver.gain`).
        selftest_vectors: The fewest vectors of the self-test, at least 16.
        selftest_timeout_s: How long the native self-test may run.
        layout_workspace_bytes: The most bytes that the layout of a weight may need at run time
            beside its operands; a layout that needs more is not chosen.
        limits: What the submission may cost; more is refused with a `LimitError`.
        accuracy_budget: The most accuracy on calibration cards, as a share of questions, that
            removing heads and channels may lose; 0 changes no number.
        kv: How keys and values are stored between runs; codes of int8 change what comes out.
        constant_time: Make a plan whose time and accesses depend on no activation and no value of a
            weight; see `compiler.quant.constant_time` for what is protected.
        substitutes: Whether the plan may have variants without routers, for devices in need and for
            routers in trouble; see `compiler.contract.substitutes`.
        progress: Called with a stage of `STAGES` and the share of the whole work done so far.
    """

    target: str
    model: str
    version: str
    release_seq: int = 1
    security_epoch: int = 0
    cache_dir: Path | None = None
    cache_limit_bytes: int = DEFAULT_LIMIT_BYTES
    recheck: bool = False
    base_sections: Mapping[str, bytes] | None = None
    base_planes: Mapping[str, tuple[Plane, ...]] | None = None
    base_answers: AnswerScores | None = None
    selftest_vectors: int = MIN_VECTORS
    selftest_timeout_s: float = 120.0
    layout_workspace_bytes: int = WORKSPACE_BUDGET_BYTES
    limits: ImportLimits = DEFAULT_LIMITS
    accuracy_budget: float = 0.0
    kv: KvKind = KvKind.F32
    constant_time: bool = False
    substitutes: bool = True
    progress: Progress = field(default=no_progress, compare=False)

    def __post_init__(self) -> None:
        for name in ("model", "version"):
            if NAME_PATTERN.fullmatch(getattr(self, name)) is None:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} cannot be released",
                    hint=f"a {name} matches {NAME_PATTERN.pattern}",
                )
        if self.selftest_vectors < MIN_VECTORS:
            raise UsageError(f"a self-test has at least {MIN_VECTORS} vectors")
        if self.cache_limit_bytes < 0:
            raise UsageError("a cache limit is a number of bytes, 0 keeps nothing")
        if self.layout_workspace_bytes < 0:
            raise UsageError("a workspace is a number of bytes, 0 allows none")
        if not 0.0 <= self.accuracy_budget < 1.0:
            raise UsageError(
                f"an accuracy budget of {self.accuracy_budget:g}",
                hint="state a share of all questions such as 0.003; 0 loses nothing",
            )
        for name, low, high in (
            ("release_seq", 1, MAX_RELEASE_SEQ),
            ("security_epoch", 0, MAX_SECURITY_EPOCH),
        ):
            if not low <= getattr(self, name) <= high:
                raise UsageError(
                    f"{name} {getattr(self, name)} cannot be released",
                    hint=f"a {name} is a number from {low} to {high}",
                )


@dataclass(frozen=True, slots=True)
class CompiledBundle:
    """One model version for one target.

    Attributes:
        manifest: Ready to be signed.
        sections: Bytes by component, as the manifest lists them.
        report: For people and build logs (JSON): seconds per stage, operations, sizes, SQNR per
            weight, experts, what checked the code, kernel choices, provenance. Not part of the
            bundle.
        ir_text: The lowered IR in MLIR text form.
        c_source: The C that became `kernels`.
        replays: Factors of the adapters that were replayed on the base, for deltas
            (`compiler.delta.replay_file`); empty without any.
    """

    manifest: ReleaseManifest
    sections: Mapping[str, bytes]
    report: Mapping[str, Any]
    ir_text: str
    c_source: str
    replays: bytes = b""
