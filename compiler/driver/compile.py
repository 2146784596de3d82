"""Compile a submission for one target: the stages, their cache, and the bundle.

    import -> raise -> quantise -> plan -> kernels -> selftest -> manifest

Everything before `kernels`, and the expected answers of the self-test, are the same for every
target and cached once per submission; kernels are cached by their C source. The native self-test is
never cached. The same input gives the same manifest, byte for byte.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from compiler.contract.canonical import Json, canonical_bytes, sha256_hex
from compiler.contract.manifest import ReleaseManifest, Section
from compiler.contract.pipeline import ImageSpec, parse_pipeline
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import ABI_VERSION
from compiler.contract.planes import Plane
from compiler.contract.selftest import SelfTest, parse_selftest
from compiler.driver.base_grids import base_parts, base_weights, kept_codes
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.cards import Card, read_cards
from compiler.driver.emulated_check import check_emulated, emulator_of
from compiler.driver.lowering import lower_submission
from compiler.driver.native_check import (
    QEMU,
    NativeCheck,
    check_assembled,
    check_native,
    find_hints,
    host_target,
    runs_here,
)
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.driver.provenance import (
    CALIBRATION,
    provenance_document,
    section_digests,
    submission_digests,
)
from compiler.driver.sections import (
    expert_sections,
    explain_rows,
    memory_rows,
    operation_counts,
    pipeline_section,
    requirements,
    sqnr_rows,
    weight_kinds,
)
from compiler.driver.selftest import Hint, make_selftest
from compiler.driver.stages import Portable, StageClock
from compiler.emitters.c import render_kernels
from compiler.emitters.plan import emit_plan
from compiler.emitters.toolchain import compile_shared
from compiler.frontend.pipeline_json import read_pipeline
from compiler.hardware.targets import Target, find_target
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.module import pack_module

KERNEL_CACHE: Final = "toolchain"


def compile_model(submission_dir: Path, options: CompileOptions) -> CompiledBundle:
    """Compile the submission in a directory for `options.target`.

    Args:
        submission_dir: `pipeline.json`, the ONNX files it names and, for models that answer in
            words, `calibration.json` and `.npz`. Nothing else is read.
        options: See `CompileOptions`.

    Returns:
        The bundle, checked: its self-test ran on the simulator and, where this machine can run the
        target, on the shipped native code with the same bits.

    Raises:
        UserModelError: The submission is at fault (see its subclasses); do not retry.
        SelfTestError: Native code and simulator differ, or some expert cannot be reached.
        ToolchainError: The C compiler failed; another try may help.
        CompilerError: The options are wrong, or a pass made an invalid program.
    """
    target = find_target(options.target)
    spec = read_pipeline(submission_dir)
    run = _Compilation(submission_dir, options, target, spec)
    portable = run.portable()
    plan = parse_plan(portable.sections["plan"])
    c_source, kernels = run.kernels(plan)
    selftest = run.selftest(portable, kernels)
    sections = {**portable.sections, "kernels": kernels, "selftest": selftest.to_bytes()}
    check = run.check_native(sections)
    return run.bundle(portable, plan, sections, selftest, check, c_source)


class _Compilation:
    """One run: what was asked, the cache, and the clock."""

    def __init__(
        self, directory: Path, options: CompileOptions, target: Target, spec: PipelineSpec
    ) -> None:
        self.directory = directory
        self.options = options
        self.target = target
        self.spec = spec
        self.cache = StageCache(options.cache_dir)
        self.clock = StageClock(options.progress)
        self.cards = self._calibration()
        self.base = base_parts(options.base_sections)
        self.provenance = provenance_document(
            submission_digests(directory, spec),
            section_digests(self.base),
            target.id,
            options.selftest_vectors,
        )

    def portable(self) -> Portable:
        """Return what is the same for every target, from the cache if it was made before."""
        key = self._key("portable")
        stored = self.cache.get("portable", key)
        if stored is not None:
            for stage in ("import", "raise", "quantise", "plan"):
                self.clock.skip(stage)
            return Portable.from_parts(stored)
        portable = self._make_portable()
        self.cache.put("portable", key, portable.to_parts())
        return portable

    def _make_portable(self) -> Portable:
        lowered = lower_submission(self.directory, self.clock)
        with self.clock.stage("quantise"):
            base = base_weights(lowered.module, self.base, self.options.base_planes)
            packed = pack_module(lowered.module, base=base)
            kept = kept_codes(packed.packed, base)
            sqnr = sqnr_rows(lowered.module, packed.packed)
        with self.clock.stage("plan"):
            emitted = emit_plan(lowered.module, weights_packed=packed.packed)
            plan = parse_plan(emitted.plan_bytes)
            pipeline = pipeline_section(self.spec, plan)
        facts: dict[str, Json] = {
            "operations": operation_counts(plan),
            "sqnr_db": sqnr,
            "weight_bytes": weight_kinds(plan),
            "memory": memory_rows(emitted.memory),
            "notes": list(lowered.notes),
            "base": {
                "codes": kept.codes,
                "same_codes": kept.same,
                "weights_paired": len(base),
                "groups_refreshed": sum(r.groups_refreshed for r in packed.reports.values()),
                "rows_refreshed": sum(r.rows_refreshed for r in packed.reports.values()),
            }
            if base
            else None,
        }
        sections = {
            **emitted.sections,
            "plan": emitted.plan_bytes,
            "pipeline": pipeline.to_bytes(),
        }
        return Portable(sections, emitted.planes, lowered.ir_text, facts)

    def kernels(self, plan: Plan) -> tuple[str, bytes]:
        """Return the C source and the shared library."""
        with self.clock.stage("kernels"):
            return self._build(self.target, plan)

    def _build(self, target: Target, plan: Plan) -> tuple[str, bytes]:
        source = render_kernels(target, plan.ops)
        with scratch_directory() as folder:
            return source, compile_shared(source, target, self._tool_cache(folder))

    def _tool_cache(self, scratch: Path) -> Path:
        return self.cache.directory / KERNEL_CACHE if self.cache.directory else scratch

    def selftest(self, portable: Portable, kernels: bytes) -> SelfTest:
        """Return the vectors with the simulator's answers; from the cache if possible."""
        with self.clock.stage("selftest"):
            key = self._key("selftest")
            stored = self.cache.get("selftest", key)
            if stored is not None:
                return parse_selftest(stored["selftest"])
            selftest = make_selftest(
                BundleSimulator(portable.sections),
                parse_pipeline(portable.sections["pipeline"]),
                self.cards,
                expert_sections(portable.sections),
                self.options.selftest_vectors,
                self._hints(portable, kernels),
            )
            self.cache.put("selftest", key, {"selftest": selftest.to_bytes()})
            return selftest

    def _hints(self, portable: Portable, kernels: bytes) -> list[Hint]:
        """Look for rare experts with native code: the target's, or else this machine's."""
        if not runs_here(self.target):
            host = host_target()
            if host is None:
                return []
            _, kernels = self._build(host, parse_plan(portable.sections["plan"]))
        with scratch_directory() as folder:
            sections = {**portable.sections, "kernels": kernels}
            return find_hints(folder, sections, self.directory, self.options.selftest_timeout_s)

    def check_native(self, sections: Mapping[str, bytes]) -> NativeCheck:
        """Run the shipped code against the vectors: here, under an emulator, or not at all."""
        emulator = emulator_of(self.target)
        with self.clock.stage("selftest"), scratch_directory() as folder:
            if runs_here(self.target):
                return check_native(folder, sections, self.options.selftest_timeout_s)
            if emulator is not None:
                detail = check_emulated(sections, self.target, emulator, self._tool_cache(folder))
                return NativeCheck(QEMU, detail)
            return check_assembled(self.target)

    def bundle(
        self,
        portable: Portable,
        plan: Plan,
        sections: Mapping[str, bytes],
        selftest: SelfTest,
        check: NativeCheck,
        c_source: str,
    ) -> CompiledBundle:
        """Return the manifest, the sections and the report."""
        with self.clock.stage("manifest"):
            manifest = self._manifest(portable.planes, plan, sections, check)
        report: dict[str, Any] = {
            "target": self.target.id,
            "verified_on": check.verified_on,
            "native_check": dict(check.detail),
            "stages": self.clock.rows(),
            "sizes": {section.component: section.size_bytes for section in manifest.sections},
            "total_bytes": manifest.total_bytes,
            "experts": {f"L{layer}": len(ids) for layer, ids in selftest.experts.items()},
            "selftest_vectors": len(selftest.vectors),
            "explain": explain_rows(plan, self.target),
            "provenance": self.provenance,
            **portable.facts,
        }
        return CompiledBundle(manifest, dict(sections), report, portable.ir_text, c_source)

    def _manifest(
        self,
        planes: Mapping[str, tuple[Plane, ...]],
        plan: Plan,
        sections: Mapping[str, bytes],
        check: NativeCheck,
    ) -> ReleaseManifest:
        options = self.options
        return ReleaseManifest(
            model=options.model,
            version=options.version,
            release_seq=options.release_seq,
            security_epoch=options.security_epoch,
            target=self.target.id,
            plan_abi=ABI_VERSION,
            requires=requirements(plan, sections),
            verified_on=check.verified_on,
            sections=tuple(
                Section(name, len(data), sha256_hex(data), planes.get(name, ()))
                for name, data in sorted(sections.items())
            ),
            provenance_sha256=sha256_hex(canonical_bytes(self.provenance)),
        )

    def _calibration(self) -> tuple[Card, ...]:
        image = self.spec.image
        if image is None:
            return ()
        size = ImageSpec(image.height, image.width, image.channels)
        return read_cards(self.directory, CALIBRATION, size)

    def _key(self, stage: str) -> str:
        facts = {name: value for name, value in self.provenance.items() if name != "target"}
        return cache_key(stage, facts)
