"""A small routed model as bundles in a store, and what it says where nothing goes wrong.

Two bundles of one model differ in their kernels alone. `Reference` answers with all weights in
memory, on one thread, by no policy: natively, and once more over numpy.
"""

import hashlib
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from compiler.contract.bands import MAX_ENTROPY, STEP, Band, BandedRunner, Bands
from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import ReleaseManifest, Requirements, Section
from compiler.contract.pipeline import (
    FAMILY_VISION,
    SEE,
    ImageSpec,
    Pipeline,
    Port,
    ProgramSpec,
    TokenSpec,
)
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import ABI_VERSION
from compiler.contract.pool_plan import PoolPlan, plan_pool
from compiler.contract.selftest import SelfTest
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore, Session
from compiler.contract.steering import Residency, Steering
from compiler.emitters.bands import with_entropy, with_variants
from compiler.emitters.schedule import obey, schedule_ops
from compiler.kernels.program import Module
from device_agent.runtime.answers import Question
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer
from tests.factories.kernels import PORTABLE, Case, library, native_targets
from tests.factories.modules import DecoderBuilder
from tests.factories.pools import RUN
from tests.factories.steering import random_record

SIDE, KEPT, WORDS, MOST_SAID = 8, 4, 40, 20
NARROW = "step.band1"
BANDS = Bands(
    1, 0, 800, 700, 5000, 0, 0,
    (Band(0, STEP, 2, 1000, 0, 0, "all"), Band(MAX_ENTROPY, NARROW, 1, 0, 0, 0, "one")),
)  # fmt: skip
"""No entropy leads to the variant with one expert: only who asks for the fewest takes it."""
TOKENS = TokenSpec(
    vocabulary=("<end>", "?", *(f"w{number}" for number in range(2, WORDS))),
    eos=0,
    position_base=KEPT,
    prompts={"question_prefix": ("?",), "question_suffix": ("?",), "caption": ("w5", "?")},
    max_answer_tokens=MOST_SAID,
)


def module(seed: int = 6) -> Module:
    """Return two layers of six experts, their schedule on the tape, and the variant."""
    builder = DecoderBuilder(
        seed, width=32, heads=2, experts=6, hidden=120, vocabulary=WORDS, capacity=48, max_tokens=8
    )
    builder.add_see(SIDE, KEPT)
    builder.add_step()
    bias = builder.weights[builder.head_bias].array
    bias[TOKENS.eos] += 0.9  # so that most answers end by themselves
    made = with_variants(with_entropy(builder.module()), {NARROW: (1, 1)})
    likely = {0: (0, 1, 2), 1: (2, 3, 4)}
    shown = {program.name: likely for program in made.programs}
    return obey(made, schedule_ops(made, shown), shown)


def pipeline_of(made: Module, programs: Collection[str] = (SEE, STEP)) -> Pipeline:
    """Return what may be asked of it."""

    def ports(roles: Mapping[str, int]) -> dict[str, Port]:
        rows = {role: made.buffers[at] for role, at in roles.items()}
        return {role: Port(b.rows, b.cols, b.dtype, b.dynamic) for role, b in rows.items()}

    specs = {
        program.name: ProgramSpec(ports(program.inputs), ports(program.outputs))
        for program in made.programs
        if program.name in programs
    }
    image = ImageSpec(SIDE, SIDE, 1)
    context = made.kv.capacity if made.kv is not None else 0
    return Pipeline(FAMILY_VISION, image, TOKENS, context, made.max_tokens, specs)


@dataclass(frozen=True)
class Installed:
    """Bundles of one model in a store; `sections` are those of either."""

    case: Case
    pipeline: Pipeline
    folder: Path
    store: ObjectStore
    pointers: tuple[Pointer, ...]
    sections: Mapping[str, Section]

    @property
    def layout(self) -> PoolPlan:
        """How the weights are laid out where all would fit."""
        return plan_pool(parse_plan(self.case.emitted.plan_bytes), 1 << 40, RUN)


def installed(folder: Path) -> Installed:
    """Put a bundle for each of two builds of the kernels into a store below `folder`."""
    case = Case.of(module())
    pipeline = pipeline_of(case.module)
    store = ObjectStore(Disk(), folder, max_bytes=1 << 30)
    pointers, sections = [], {}
    for number, target in enumerate((PORTABLE, native_targets()[-2])):
        parts = {
            **case.emitted.sections,
            "plan": case.emitted.plan_bytes,
            "kernels": library(target),
            "pipeline": pipeline.to_bytes(),
            "selftest": SelfTest((), {}).to_bytes(),
            "bands": BANDS.to_bytes(),
        }
        rows = [Section(name, len(data), sha256_hex(data)) for name, data in sorted(parts.items())]
        for row in rows:
            store.put(bytes(parts[row.component]), row.sha256)
            sections[row.component] = row
        manifest = ReleaseManifest(
            model="soaked",
            version=str(number),
            release_seq=1 + number,
            security_epoch=0,
            target="x86-64-v1",
            plan_abi=ABI_VERSION,
            requires=Requirements(1, 1),
            verified_on="host",
            sections=tuple(rows),
            provenance_sha256=sha256_hex(b"soaked"),
        ).to_bytes()
        store.put(manifest, sha256_hex(manifest))
        pointers.append(Pointer(sha256_hex(manifest), len(manifest), target, number))
    return Installed(case, pipeline, folder, store, tuple(pointers), sections)


def random_question(source: random.Random) -> Question:
    """Return a few words, about another picture now and then."""
    image = source.randbytes(SIDE * SIDE) if source.random() < 0.1 else b""
    if source.random() < 0.05:
        return Question(image, "caption", ())
    words = source.choices(TOKENS.vocabulary[1:], k=source.randint(1, 12))
    return Question(image, "question", tuple(words))


def digest_of(outputs: Mapping[str, Buffer]) -> bytes:
    """Return the digest of everything that a run put out."""
    found = hashlib.blake2b(digest_size=16)
    for role in sorted(outputs):
        found.update(outputs[role])
    return found.digest()


@dataclass(frozen=True)
class Said:
    """One answer: the digest of every step, the words, and whether it ended by itself."""

    steps: tuple[bytes, ...]
    words: tuple[str, ...]
    stopped: bool


class _Recorder(RunnerBefore):
    def __init__(self, runner: PlanRunner) -> None:
        super().__init__(runner)
        self.steps: list[bytes] = []

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        outputs = self._runner.run(program, inputs)
        if program != SEE:
            self.steps.append(digest_of(outputs))
        return outputs


@dataclass(frozen=True)
class Steered:
    """A steering record with a table of its own, so that its bits do not depend on a pool."""

    steering: Steering
    residency: Residency


def random_steered(weights: int, seed: int) -> Steered:
    """Return a record of any kind, and a table that says of half of the experts they are absent."""
    source = np.random.default_rng(seed)
    table = Residency(weights)
    for weight in range(weights):
        table[weight] = bool(source.random() < 0.5)
    return Steered(random_record(weights, source), table)


class _Asked:
    """A runner that is asked as an answerer asks its plan."""

    def __init__(self, runner: PlanRunner, pipeline: Pipeline) -> None:
        self._recorder = _Recorder(runner)
        self._banded = BandedRunner(self._recorder, BANDS)
        self._session = Session(self._banded, pipeline)
        self._seen: tuple[bytes, Steered | None] = b"", None

    def say(
        self, view: bytes, question: Question, steered: Steered | None, *, fewest: bool
    ) -> Said:
        if (view, steered) != self._seen:
            self._seen = view, steered
            if view:
                self._session.keep(view)
            else:
                self._session.forget()
        self._recorder.steps.clear()
        self._banded.fewest = fewest
        found = self._session.answer(TOKENS.prompt(question.prompt, question.words))
        words = tuple(TOKENS.words(found.tokens))
        return Said(tuple(self._recorder.steps), words, found.stopped)


@dataclass
class Reference:
    """What a device without faults says, natively or by the simulator."""

    at: Installed
    _steered: dict[str, Steered | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.at.case
        self._native, self._simulator = case.native(PORTABLE), case.simulator()
        self._plain = _Asked(self._native, self.at.pipeline)
        self._simulated = _Asked(self._simulator, self.at.pipeline)

    def native(
        self, view: bytes, question: Question, steered: Steered | None, *, fewest: bool = False
    ) -> Said:
        """Answer with the plan."""
        if self._steered.get("native") is not steered:
            if steered is None:
                self._native.steering.clear()
            else:
                self._native.steering.publish(steered.steering, steered.residency)
            self._steered["native"] = steered
        return self._plain.say(view, question, steered, fewest=fewest)

    def simulated(
        self, view: bytes, question: Question, steered: Steered | None, *, fewest: bool = False
    ) -> Said:
        """Answer over numpy."""
        one = (None, None) if steered is None else (steered.steering, steered.residency)
        self._simulator.set_steering(*one)
        return self._simulated.say(view, question, steered, fewest=fewest)

    def close(self) -> None:
        """Free the native memory."""
        self._native.close()
