"""What stands in for routers: the simulator's bits, rungs of a device, and a router in trouble."""

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.degrade import Rung, parse_rules, rules_bytes
from compiler.contract.manifest import ReleaseManifest, Requirements, Section
from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NotFiniteError
from compiler.contract.operations import Op
from compiler.contract.pipeline import SEE, Pipeline
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import ABI_VERSION
from compiler.contract.pool_plan import least_runs, paged_sections
from compiler.contract.selftest import SelfTest
from compiler.contract.session import STEP, Session
from compiler.contract.substitutes import SECTION, Substitute, SubstituteRunner, Substitutes, Trial
from compiler.emitters.substitutes import Substituted
from compiler.kernels.program import Module
from device_agent.runtime.answers import BundleAnswerer, Outcome, Question
from device_agent.runtime.assembly import Assembly, Opening
from device_agent.runtime.bundle import load_directory
from device_agent.runtime.custody import Opened
from device_agent.runtime.degrade_keeper import DegradeKeeper, rungs_of
from device_agent.runtime.faults import FaultKind
from device_agent.runtime.guard import InferenceGuard
from device_agent.runtime.moe_runtime import MoERuntime
from tests.factories.kernels import PORTABLE, Case, ids, library, native_targets, raw
from tests.factories.modules import DecoderBuilder
from tests.factories.soaked import KEPT, SIDE, TOKENS, pipeline_of
from tests.factories.substitutes import case_of, substituted

NARROW, FULL, SHARED = (
    Substitute.NARROW_DENSE, Substitute.FULL_DENSE, Substitute.SHARED_ONLY,
)  # fmt: skip
IMAGE = random.Random(4).randbytes(SIDE * SIDE)
QUESTION = Question(IMAGE, "question", ("w3", "w7"))
AGAIN = Question(b"", "question", ("w3", "w7"))


def module(seed: int = 6, *, swiglu: bool = False) -> Module:
    builder = DecoderBuilder(
        seed, width=32, heads=2, experts=6, hidden=128, vocabulary=40, capacity=48, max_tokens=8,
        swiglu=swiglu,
    )  # fmt: skip
    builder.add_see(SIDE, KEPT)
    builder.add_step()
    builder.weights[builder.head_bias].array[TOKENS.eos] += 0.9
    return builder.module()


def pipeline(made: Module) -> Pipeline:
    return pipeline_of(made, {program.name for program in made.programs})


def step(tokens: list[int], first: int) -> dict[str, bytes]:
    positions = ids(range(first, first + len(tokens)))
    return {"token_ids": ids(tokens).tobytes(), "positions": positions.tobytes()}


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("target", native_targets())
def test_every_variant_has_the_bits_of_the_simulator(target: str, swiglu: bool) -> None:
    """A switch takes effect at the next step, in the middle of an answer, over one cache."""
    case = case_of(substituted(module(swiglu=swiglu)))
    simulator, first = case.simulator(), KEPT
    with case.native(target) as native:
        for seen in ("see", "see.shared", "see.narrow", "see.full"):
            native.kv_length = simulator.kv_length = 0
            first = KEPT
            image = {"image": IMAGE}
            assert raw(native.run(seen, image)) == raw(simulator.run(seen, image))
            for program, tokens in (
                ("step", [1, 2, 3]), ("step.narrow", [4]), ("step.full", [5, 6]),
                ("step.shared", [7]), ("step", [8]), ("step.narrow", [9, 1]), ("step", [2]),
            ):  # fmt: skip
                values = step(tokens, first)
                expected = raw(simulator.run(program, values))
                assert raw(native.run(program, values)) == expected
                assert np.isfinite(np.frombuffer(expected["logits"], "<f4")).all()
                first += len(tokens)
                assert native.kv_length == simulator.kv_length == first


def test_only_what_no_router_gives_is_left_out() -> None:
    made = substituted(module()).module
    outputs = {program.name: {*program.outputs} for program in made.programs}
    assert outputs["step"] == {"logits", "token", "routing"}
    for kind in Substitute:
        assert outputs[f"step.{kind.suffix}"] == {"logits", "token"}
        assert outputs[f"see.{kind.suffix}"] == outputs["see"]


def test_a_pool_needs_room_for_what_routers_choose_only() -> None:
    """All experts of a layer at once are no reason to refuse a small device."""
    plain, whole = (
        parse_plan(case_of(one).emitted.plan_bytes)
        for one in (Substituted(module()), substituted(module()))
    )
    assert paged_sections(plain) == paged_sections(whole)
    names = paged_sections(plain)
    assert least_runs(plain, names, 4096) == least_runs(whole, names, 4096) > 0


class Bundles:
    """Writes directories with a bundle."""

    def __init__(self, folder: Path, *kinds: Substitute) -> None:
        self.folder, self.kinds = folder, kinds
        self.case = case_of(substituted(module(), *kinds) if kinds else Substituted(module()))
        self.pipeline = pipeline(self.case.module)

    def written(self, sections: Mapping[str, bytes] | None = None, worse: int = 2) -> Path:
        emitted = self.case.emitted
        parts = {
            **(sections or emitted.sections),
            "plan": emitted.plan_bytes,
            "kernels": library(PORTABLE),
            "pipeline": self.pipeline.to_bytes(),
            "selftest": SelfTest((), {}).to_bytes(),
        }
        if self.kinds:
            rows = tuple(Trial(kind, worse * (kind is NARROW), 0) for kind in self.kinds)
            parts[SECTION] = Substitutes(100, 90, 250_000, rows).to_bytes()
        (self.folder / "sections").mkdir(exist_ok=True)
        for name, data in parts.items():
            (self.folder / "sections" / name).write_bytes(data)
        manifest = ReleaseManifest(
            model="small",
            version="1",
            release_seq=1,
            security_epoch=0,
            target="x86-64-v1",
            plan_abi=ABI_VERSION,
            requires=Requirements(1, 1),
            verified_on="host",
            sections=tuple(
                Section(name, len(data), sha256_hex(data)) for name, data in sorted(parts.items())
            ),
            provenance_sha256=sha256_hex(b""),
        )
        (self.folder / "manifest.json").write_bytes(manifest.to_bytes())
        return self.folder

    def with_bad_router(self, value: float) -> dict[str, bytes]:
        """Return the sections with one number of every router's weights another one."""
        plan = parse_plan(self.case.emitted.plan_bytes)
        sections = {name: bytearray(data) for name, data in self.case.emitted.sections.items()}
        routers = {
            call.weights[0]
            for program in plan.programs
            for call in program.calls
            if call.op is Op.ROUTE and "." not in program.name
        }
        for at in routers:
            weight = plan.weights[at]
            data = sections[plan.sections[weight.section].name]
            bad = np.float32(value).tobytes() * weight.cols
            data[weight.offset : weight.offset + len(bad)] = bad
        return {name: bytes(data) for name, data in sections.items()}

    def said(self, kind: Substitute | None) -> tuple[str, ...]:
        """Return what the simulator answers with a substitute at work in every program."""
        runner = SubstituteRunner(self.case.simulator(), self.kinds, self.pipeline.programs)
        runner.taken = kind
        session = Session(runner, self.pipeline)
        session.see(IMAGE)
        return session.ask("question", QUESTION.words)


def guarded(folder: Path) -> InferenceGuard:
    def reopen() -> Opened[BundleAnswerer]:
        return Opened(BundleAnswerer(Assembly(load_directory(folder)), 60.0))

    return InferenceGuard(reopen, 60.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kinds", [(NARROW,), (NARROW, FULL), (FULL,), (SHARED,)])
def test_a_router_in_trouble_leads_to_what_needs_none(
    value: float, kinds: tuple[Substitute, ...], tmp_path: Path
) -> None:
    bundles = Bundles(tmp_path, *kinds)
    bad = bundles.with_bad_router(value)
    plan = NativePlan(library(PORTABLE), bundles.case.emitted.plan_bytes, bad)
    with plan, pytest.raises(NotFiniteError):
        plan.run(SEE, {"image": IMAGE})
    subject = guarded(bundles.written(bad))
    records = [subject.answer(QUESTION), subject.answer(AGAIN)]
    expected = bundles.said(kinds[-1])
    for record in records:
        assert record.words == expected
        assert record.outcome in (Outcome.ENDED, Outcome.CUT_OFF), "as the model ends by itself"
        assert record.degraded
        assert record.reasons == ("not_finite",)
        assert set(record.faults) == {FaultKind.NOT_FINITE}
    facts = subject.facts
    ended = sum(record.outcome is Outcome.ENDED for record in records)
    assert facts["guard"]["recovered"] == ended
    assert facts["guard"]["degraded"] == {"not_finite": 2}
    assert facts["substitutes"]["fallback"] == kinds[-1].value
    subject.close()


def test_token_by_token_a_router_in_trouble_leads_there_too(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, NARROW)
    folder = bundles.written(bundles.with_bad_router(float("nan")))
    opening = Opening(lambda: load_directory(folder))
    with MoERuntime(opening) as runtime, runtime.session() as session:
        first = session.generate("w3 w7", image=IMAGE)
        assert first.words() == bundles.said(NARROW)
        assert (first.stats.degraded, first.stats.reasons) == (True, ("not_finite",))
        again = session.generate("w3 w7")
        assert again.words() == bundles.said(NARROW)
        assert again.stats.degraded


def test_without_a_substitute_a_router_in_trouble_is_no_answer(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    subject = guarded(bundles.written(bundles.with_bad_router(float("nan"))))
    record = subject.answer(QUESTION)
    assert (record.outcome, record.words, record.degraded) == (Outcome.ERROR, (), True)
    assert record.faults == (FaultKind.NOT_FINITE,)
    subject.close()


def test_a_good_router_is_left_alone(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, NARROW, FULL)
    subject = guarded(bundles.written())
    record = subject.answer(QUESTION)
    assert (record.words, record.degraded, record.faults) == (bundles.said(None), False, ())
    assert subject.facts["substitutes"]["ran"] == {}
    subject.close()


RULES = parse_rules(
    rules_bytes(
        [
            {
                "name": "full",
                "when": "memory_pressure > 80 %",
                "leave": "memory_pressure < 60 %",
                "rung": "narrow_dense",
                "priority": 50,
                "cooldown_s": 0,
            }
        ]
    )
)


@pytest.mark.parametrize("kind", [NARROW, SHARED])
def test_a_rule_takes_the_rung_and_lets_go(kind: Substitute, tmp_path: Path) -> None:
    """The lowest rung that there is; a picture that was seen on it is looked at again above it."""
    bundles = Bundles(tmp_path, kind)
    bundle = load_directory(bundles.written())
    clock, pressure = [0.0], [10.0]
    rungs = rungs_of(bundle.bands, bundle.substitutes)
    assert rungs == (Rung.NORMAL, Rung[kind.name])
    assert bundle.ladder[rungs[1]] < bundle.ladder[Rung.NORMAL]
    keeper = DegradeKeeper(RULES, rungs, lambda: clock[0], lambda: {"memory_pressure": pressure[0]})
    subject = BundleAnswerer(Assembly(bundle, degrade=keeper), 60.0)
    expected = {True: bundles.said(kind), False: bundles.said(None)}
    assert expected[True] != expected[False], "else the test would not see which one answered"
    subject.answer(QUESTION)
    for at, value in enumerate((10.0, 90.0, 90.0, 50.0, 50.0)):
        clock[0], pressure[0] = 100.0 * at, value
        record = subject.answer(AGAIN)
        is_low = value > 60
        assert record.words == expected[is_low]
        assert (record.degraded, record.reasons) == (is_low, ("memory_pressure",) * is_low)
    facts = subject.facts
    assert facts["degrade"]["planned_bytes"].keys() == {"normal", rungs[1].name.lower(), *()} | (
        {"no_prefetch"} if Rung.NO_PREFETCH in bundle.ladder else set()
    )
    assert facts["substitutes"]["ran"][f"{STEP}.{kind.suffix}"] > 1
    assert facts["substitutes"]["ran"][f"{SEE}.{kind.suffix}"] == 1
    subject.close()


def test_a_case_is_emitted_alike() -> None:
    one, two = (case_of(substituted(module())) for _ in range(2))
    assert isinstance(one, Case)
    assert one.emitted.plan_bytes == two.emitted.plan_bytes
    assert one.emitted.sections == two.emitted.sections
