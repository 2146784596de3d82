"""Entropy bands in a bundle: variants of `step` that calibration allows, and the `bands` section.

    module -> with entropy and all variants -> plan -> trial on calibration cards -> bands
    module -> with entropy and the variants of the bands -> tape with its schedule

Called between packing and emitting. Where a model has no cards, no `step` or nothing to take fewer
of, or where every variant loses too much, the module stays as it is and the report says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from compiler.contract.bands import (
    MAX_ENTROPY,
    MILLI,
    PREFIX,
    STEP,
    Bands,
    parse_bands,
    verify_bands,
)
from compiler.contract.canonical import Json
from compiler.contract.ladder import require_ladder
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.substitutes import SECTION as SUBSTITUTES
from compiler.contract.substitutes import parse_substitutes, verify_substitutes
from compiler.driver import band_trial
from compiler.driver.band_trial import Trial, read_trial, top_k_of, trial_bytes, try_bands
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.cards import read_cards
from compiler.driver.kernel_stage import kernels_for
from compiler.driver.native_check import host_target, run_child, write_sections
from compiler.driver.provenance import (
    CALIBRATION,
    calibration_digests,
    compiler_digest,
    section_digests,
)
from compiler.driver.scheduling import schedule_module
from compiler.driver.sections import image_spec, pipeline_section
from compiler.emitters.bands import (
    call_sources,
    can_band,
    common_top_k,
    routed_layers,
    with_entropy,
    with_variants,
)
from compiler.emitters.plan import emit_plan
from compiler.emitters.schedule import Likely
from compiler.errors import SelfTestError
from compiler.kernels.program import Module, ProgramError, validate_module
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.record import CalibrationRecord
from compiler.quant.router_stats import likely_experts, step_entropies
from compiler.quant.w4 import PackedW4

BANDS: Final = "bands"
TRIAL: Final = "band_trial"
TRIAL_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Banded:
    """A module with the variants that its bands need.

    Attributes:
        likely: By variant, the experts that its band is likely to need.
        sections: `bands`, if some band has a variant.
        facts: Rows of the report.
        sources: By program, which call of the module's first `step` each call is from, -1 = none.
        variants: By further variant, which call of its program each call is from.
    """

    module: Module
    likely: Mapping[str, Likely] = field(default_factory=dict)
    sections: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Json] = field(default_factory=lambda: {BANDS: None})
    sources: Mapping[str, Sequence[int]] = field(default_factory=dict)
    variants: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def with_sources(self, origins: Mapping[str, Any]) -> dict[str, Json]:
        """Return what `origin_facts` says of the first module, for the programs of this one."""
        calls = dict(origins["calls"])
        step = calls.get(STEP, [])
        for name, numbers in self.sources.items():
            calls[name] = [step[at] if at >= 0 else [] for at in numbers]
        for name, numbers in self.variants.items():
            calls[name] = [calls[name.partition(".")[0]][at] for at in numbers]
        return {**origins, "calls": calls}

    def verify(self, plan: Plan) -> None:
        """Check the emitted plan against the sections.

        Raises:
            ContractError: They contradict each other: a defect of the emitter.
        """
        bands = parse_bands(self.sections[BANDS]) if BANDS in self.sections else None
        if bands is not None:
            verify_bands(plan, bands)
        found = self.sections.get(SUBSTITUTES)
        verify_substitutes(plan, None if found is None else parse_substitutes(found))
        if bands is not None or found is not None:
            require_ladder(plan, bands)


def band_module(
    directory: Path,
    spec: PipelineSpec,
    module: Module,
    packed: Mapping[int, PackedW4],
    record: CalibrationRecord | None,
    cache: StageCache,
) -> Banded:
    """Return the module with the variants that calibration allows.

    Args:
        directory: The submission, for its calibration cards.
        spec: Its words and limits.
        module: The lowered module with its routers rounded.
        packed: Its packed weights.
        record: What calibration saw; None if there is nothing to measure with.
        cache: Where trials and kernels are.

    Raises:
        SelfTestError: Native code crashed in the trial, or took too long.
    """
    top_k = common_top_k(module)
    if record is None or not can_band(module):
        return Banded(module)
    measured = with_entropy(module)
    layers = routed_layers(module)
    narrower = {f"{PREFIX}{k}": (k,) * layers for k in range(1, top_k)}
    trial_module = with_variants(measured, narrower)
    try:
        validate_module(trial_module)
    except ProgramError:  # something besides the experts reads what the router chose
        return Banded(module)
    trial = _trial(directory, spec, schedule_module(trial_module, record).module, packed, cache)
    bands = _named(trial.bands)
    facts: dict[str, Json] = {BANDS: _facts(bands, trial.steps)}
    if not bands.programs:
        return Banded(module, facts=facts)
    variants = {
        band.program: (band.top_k,) * layers for band in bands.bands if band.program != STEP
    }
    return Banded(
        with_variants(measured, variants),
        _likely(module, record, bands),
        {BANDS: bands.to_bytes()},
        facts,
        call_sources(module, measured, variants),
    )


def _facts(bands: Bands, steps: Mapping[str, int]) -> Json:
    """Return the report's row: all that the section says, and how many steps were narrower."""
    return {
        **asdict(bands),
        "bands": [asdict(band) for band in bands.bands],
        "steps_narrow": sum(count for name, count in steps.items() if name != STEP),
        "steps": sum(steps.values()),
    }


def _named(bands: Bands) -> Bands:
    """Return the bands with a variant of its own for each that has one, by number."""
    rows = tuple(
        band if band.program == STEP else replace(band, program=f"{PREFIX}{at}")
        for at, band in enumerate(bands.bands)
    )
    return replace(bands, bands=rows)


def _likely(module: Module, record: CalibrationRecord, bands: Bands) -> dict[str, Likely]:
    """Return what the calibration steps of each band's entropy chose most."""
    entropies = step_entropies(module, record)
    ends = [*(band.low for band in bands.bands[1:]), MAX_ENTROPY]
    found: dict[str, Likely] = {}
    for band, end in zip(bands.bands, ends, strict=True):
        runs = frozenset(run for run, x in entropies.items() if band.low <= x * MILLI < end)
        if band.program != STEP and runs:
            found[band.program] = likely_experts(record, vision=False, runs=runs)
    return found


def _trial(
    directory: Path,
    spec: PipelineSpec,
    module: Module,
    packed: Mapping[int, PackedW4],
    cache: StageCache,
) -> Trial:
    emitted = emit_plan(module, weights_packed=packed)
    plan = parse_plan(emitted.plan_bytes)
    pipeline = pipeline_section(spec, plan)
    sections = {**emitted.sections, "plan": emitted.plan_bytes, "pipeline": pipeline.to_bytes()}
    facts: dict[str, Json] = {
        "sections": dict(section_digests(sections)),
        "calibration": dict(calibration_digests(directory)),
        "compiler": compiler_digest(),
    }
    key = cache_key(TRIAL, facts)
    stored = cache.get(TRIAL, key)
    if stored is not None:
        return read_trial(stored[TRIAL])
    host = host_target()
    if host is not None:
        kernels = kernels_for(host, plan.ops, cache)
        data = _native_trial({**sections, "kernels": kernels}, directory)
    else:
        size = image_spec(spec)
        assert size is not None  # there is a record, so there are pictures
        cards = read_cards(directory, CALIBRATION, size)
        found = try_bands(BundleSimulator(sections), pipeline, cards, top_k_of(plan))
        data = trial_bytes(found)
    cache.put(TRIAL, key, {TRIAL: data})
    return read_trial(data)


def _native_trial(sections: Mapping[str, bytes], submission: Path) -> bytes:
    with scratch_directory() as folder:
        write_sections(folder, sections)
        done = run_child(band_trial.__name__, [folder, submission], TRIAL_TIMEOUT_S)
    if done.status:
        raise SelfTestError(f"the entropy bands could not be measured: {done.error_text(400)}")
    return done.output
