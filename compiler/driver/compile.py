"""Compile a submission for one target: the stages, their cache, and the bundle.

    import -> raise -> quantise -> plan -> kernels -> selftest -> manifest

Every stage is kept by the content of what it depends on (see `portable_stage`, `kernel_stage`,
`vector_stage`, `verdicts`): a stage runs only if something it reads has changed. What a stage needs
is loaded when it runs, so that an unchanged submission loads neither ONNX nor the passes. The same
input gives the same manifest, byte for byte, whatever is kept.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from compiler.contract.canonical import Json, canonical_bytes, sha256_hex
from compiler.contract.manifest import ReleaseManifest, Section
from compiler.contract.plan import Plan
from compiler.contract.plan_format import ABI_VERSION
from compiler.contract.planes import Plane
from compiler.contract.selftest import SelfTest, parse_selftest
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.caveats import caveats_of
from compiler.driver.explain.document import explain_document
from compiler.driver.explain.picture import picture
from compiler.driver.gain_stage import GainStage
from compiler.driver.kernel_stage import (
    KernelBuild,
    find_kernels,
    kernels_for,
    tool_cache,
)
from compiler.driver.native_check import (
    QEMU,
    Measured,
    NativeCheck,
    check_assembled,
    check_native,
    check_opencl,
    emulator_of,
    host_target,
    runs_here,
    take_times,
)
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.driver.plan_facts import base_parts, explain_rows, requirements
from compiler.driver.policy_stage import POLICY, policy_facts, policy_section
from compiler.driver.provenance import (
    CALIBRATION,
    calibration_digests,
    compiler_digest,
    model_digests,
    provenance_document,
    section_digests,
)
from compiler.driver.stages import ORIGINS, Portable, StageClock
from compiler.driver.verdicts import find_times, find_verdict, keep_times, keep_verdict, verdict_key
from compiler.errors import UserModelError
from compiler.frontend.pipeline_json import read_pipeline
from compiler.hardware.measured import measured_label
from compiler.hardware.targets import OPENCL, Target, find_target
from compiler.passes.pipeline_spec import PipelineSpec

PORTABLE: Final = "portable"
VECTORS: Final = "vectors"
CALIBRATION_FILES: Final = 2
_SHARED_STAGES: Final = ("import", "raise", "quantise", "plan")


def compile_model(submission_dir: Path, options: CompileOptions) -> CompiledBundle:
    """Compile the submission in a directory for `options.target`.

    Args:
        submission_dir: `pipeline.json`, the ONNX files it names with their external data and, for
            models that answer in words, `calibration.json` and `.npz`. Nothing else is read.
        options: See `CompileOptions`.

    Returns:
        The bundle, checked: its self-test ran on the simulator and, where this machine can run the
        target, on the shipped native code with the same bits.

    Raises:
        UserModelError: The submission is at fault (see its subclasses); do not retry.
        GainLostError: What the version gained over its base is lost in quantisation.
        SelfTestError: Native code and simulator differ, or some expert cannot be reached.
        ToolchainError: The C compiler failed; another try may help.
        CompilerError: The options are wrong, or a pass made an invalid program.
    """
    target = find_target(options.target)
    spec = read_pipeline(submission_dir)
    run = _Compilation(submission_dir, options, target, spec)
    run.require_calibration()
    with run.building:
        portable = run.portable()
        plan = portable.plan
        c_source, kernels = run.kernels(plan)
    gain = run.begin_gain(portable, kernels)
    selftest = run.selftest(portable, plan, kernels)
    policy = policy_section(target, run.cache, fixed=options.constant_time)
    made = {"kernels": kernels, "selftest": selftest.to_bytes(), POLICY: policy}
    sections = {**portable.sections, **made}
    check = run.check(sections)
    explained = explain_document(
        plan, target, selftest, run.times(sections), portable.facts[ORIGINS]
    )
    gained = run.gain_facts(gain)
    bundle = run.bundle(portable, plan, sections, selftest, check, explained, c_source)
    run.cache.trim()
    report = {**bundle.report, **gained}
    return replace(bundle, report={**report, "caveats": caveats_of(report, options)})


class _Compilation:
    """One run: what was asked, the cache, and the clock."""

    def __init__(
        self, directory: Path, options: CompileOptions, target: Target, spec: PipelineSpec
    ) -> None:
        self.directory = directory
        self.options = options
        self.target = target
        self.cache = StageCache(options.cache_dir, options.cache_limit_bytes)
        self.clock = StageClock(options.progress)
        self.spec = spec
        self.building = KernelBuild(target, self.cache)
        self.base = base_parts(options.base_sections)
        self.calibration = calibration_digests(directory)
        self.model_files = model_digests(directory, spec)
        self.provenance = provenance_document(
            self.model_files | self.calibration,
            section_digests(self.base),
            target.id,
            options.selftest_vectors,
            options.accuracy_budget,
            options.kv,
            options.constant_time,
            options.substitutes,
        )

    def require_calibration(self) -> None:
        """Refuse a model that sees pictures and brings no pictures to test it with.

        Raises:
            MalformedModelError: A file of the set is missing; the message names it.
            UserModelError: There is an accuracy budget and nothing to judge accuracy by.
        """
        image = self.spec.image
        if image is not None and len(self.calibration) < CALIBRATION_FILES:
            from compiler.driver.cards import read_cards

            read_cards(self.directory, CALIBRATION, image.size)
        if self.options.accuracy_budget and (image is None or self.spec.tokens is None):
            raise UserModelError(
                "an accuracy budget needs a model that answers questions about pictures",
                hint="leave --accuracy-budget out: nothing could tell what is lost",
            )

    @property
    def _seed_release(self) -> int:
        """The release that seeds depend on; 0 if there is nothing to replay."""
        return self.options.release_seq if self.spec.merge_adapters and self.base else 0

    def portable(self) -> Portable:
        """Return what is the same for every target, from the cache if it was made before."""
        facts: dict[str, Json] = {
            "files": dict(self.model_files),
            "calibration": dict(self.calibration),
            "base": dict(section_digests(self.base)),
            "layout_workspace_bytes": self.options.layout_workspace_bytes,
            "compiler": compiler_digest(),
        }
        budget, kv = self.options.accuracy_budget, self.options.kv
        changed: dict[str, Json] = {"accuracy_budget": budget} if budget else {}
        changed |= {"kv": kv.name} if kv else {}
        changed |= {"constant_time": True} if self.options.constant_time else {}
        changed |= {} if self.options.substitutes else {"substitutes": False}
        changed |= {"release_seq": self._seed_release} if self._seed_release else {}
        key = cache_key(PORTABLE, facts | changed)
        stored = self.cache.get(PORTABLE, key)
        if stored is not None:
            for stage in _SHARED_STAGES:
                self.clock.skip(stage)
            return Portable.from_parts(stored)
        from compiler.driver.portable_stage import Ways, make_portable

        base = self.base, self.options.base_planes
        portable = make_portable(
            self.directory,
            self.spec,
            self.model_files,
            self.calibration,
            base,
            (self.options.limits, self.options.layout_workspace_bytes),
            self.cache,
            self.clock,
            self.building.begin,
            Ways(
                (budget, kv),
                self.options.constant_time,
                self.options.substitutes,
                self._seed_release,
            ),
        )
        self.cache.put(PORTABLE, key, portable.to_parts())
        return portable

    def kernels(self, plan: Plan) -> tuple[str, bytes]:
        """Return the C source and the shared library."""
        found = None
        if not self.building.is_begun:
            found = find_kernels(self.target, plan.ops, self.cache)
        if found is not None:
            self.clock.skip("kernels")
            return found
        with self.clock.stage("kernels"):
            return self.building.finish(plan.ops)

    def selftest(self, portable: Portable, plan: Plan, kernels: bytes) -> SelfTest:
        """Return the vectors with the simulator's answers; from the cache if possible."""
        facts: dict[str, Json] = {
            "sections": dict(section_digests(portable.sections)),
            "calibration": dict(self.calibration),
            "vectors": self.options.selftest_vectors,
            "compiler": compiler_digest(),
        }
        key = cache_key(VECTORS, facts)
        stored = self.cache.get(VECTORS, key)
        if stored is not None:
            self.clock.skip("selftest")
            return parse_selftest(stored["selftest"])
        with self.clock.stage("selftest"):
            from compiler.driver.vector_stage import make_vectors

            selftest = make_vectors(
                self.directory,
                portable.sections,
                plan,
                lambda: self._host_kernels(plan, kernels),
                self.options.selftest_vectors,
                self.options.selftest_timeout_s,
            )
        self.cache.put(VECTORS, key, {"selftest": selftest.to_bytes()})
        return selftest

    def begin_gain(self, portable: Portable, kernels: bytes) -> GainStage:
        """Begin to score the quantised plan, beside what comes next."""
        return GainStage(
            self.directory,
            portable.sections,
            portable.facts,
            lambda: self._host_kernels(portable.plan, kernels),
            self.cache,
            self.options.selftest_timeout_s,
        )

    def gain_facts(self, gain: GainStage) -> dict[str, Json]:
        """Return the scores and the verdict about the gain over the base; see `GainStage.facts`."""
        waiting = self.clock.stage("selftest") if gain.is_pending else nullcontext()
        with waiting:
            return gain.facts(self.options.base_answers, has_base=bool(self.base))

    def _host_kernels(self, plan: Plan, kernels: bytes) -> bytes | None:
        """Return kernels that run here: the target's, or else this machine's, or None."""
        if runs_here(self.target):
            return kernels
        host = host_target()
        if host is None:
            return None
        return kernels_for(host, plan.ops, self.cache)

    def check(self, sections: Mapping[str, bytes]) -> NativeCheck:
        """Return what running the shipped code gave: now, or earlier for the very same bytes."""
        if self.target.backend == OPENCL.backend:
            with self.clock.stage("selftest"), scratch_directory() as folder:
                return check_opencl(folder, sections, self.options.selftest_timeout_s)
        emulator = None if runs_here(self.target) else emulator_of(self.target)
        if not runs_here(self.target) and emulator is None:
            return check_assembled(self.target)
        key = verdict_key(sections, self.target, emulator)
        kept = None if self.options.recheck else find_verdict(self.cache, key)
        if kept is not None:
            return kept
        with self.clock.stage("selftest"), scratch_directory() as folder:
            if emulator is None:
                check = check_native(folder, sections, self.options.selftest_timeout_s)
            else:
                from compiler.driver.emulated_check import check_emulated

                tools = tool_cache(self.cache, folder)
                detail = check_emulated(sections, self.target, emulator, tools)
                check = NativeCheck(QEMU, detail)
        keep_verdict(self.cache, key, check)
        return check

    def times(self, sections: Mapping[str, bytes]) -> Measured | None:
        """Return seconds per call where the code runs here, taken once for the same bytes."""
        if not runs_here(self.target):
            return None
        key = verdict_key(sections, self.target, None)
        kept = None if self.options.recheck else find_times(self.cache, key)
        if kept is not None:
            return kept
        with self.clock.stage("selftest"), scratch_directory() as folder:
            found = take_times(folder, sections, self.options.selftest_timeout_s)
        if found is not None:
            keep_times(self.cache, key, found)
        return found

    def bundle(
        self,
        portable: Portable,
        plan: Plan,
        sections: Mapping[str, bytes],
        selftest: SelfTest,
        check: NativeCheck,
        explained: Mapping[str, Json],
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
            "explained": explained,
            "picture": picture(explained),
            "policy": policy_facts(
                sections[POLICY], plan, selftest, measured_label(self.target.id)
            ),
            "provenance": self.provenance,
            **{name: fact for name, fact in portable.facts.items() if name != ORIGINS},
        }
        texts = portable.ir_text, c_source
        return CompiledBundle(manifest, dict(sections), report, *texts, portable.replays)

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
