"""A whole answer of EdgeCard: our native plan against ONNX Runtime f32, one thread each.

    python -m benchmarks.answer [--check]

A whole answer is: see the card (vision and prefill), feed the question, decode until `<eos>`. Both
candidates answer the same questions from the same images, in turn, one round each. ONNX Runtime
runs the three original graphs in f32 with `intra_op_num_threads=1`; we run the bundle compiled for
this machine's best target, loaded as a device loads it.
"""

import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from benchmarks.runner import Claim, faster_claim, interleaved, main
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import parse_pipeline
from compiler.contract.session import Answer, Session, step_inputs
from compiler.driver.compile import compile_model
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle, CompileOptions
from examples.edgecard.materialise import EOS, load_cards, materialise, vocabulary
from examples.edgecard.measure_reference import POSITION_BASE, ReferenceModel, prompt_ids

CACHE: Final = Path(__file__).parent / "results" / "cache"
CARDS: Final = 12
QUESTIONS_PER_CARD: Final = 4
ROUNDS: Final = 7
SEE_ROUNDS: Final = 21
STEPS: Final = 100
MILLISECONDS: Final = 1e3
BAR: Final = 2.0
PEER: Final = "ONNX Runtime f32, 1 thread"


@dataclass(frozen=True, slots=True)
class Item:
    """One question. image: (64, 64) u8."""

    image: NDArray[np.uint8]
    prompt: list[int]


def questions() -> list[Item]:
    """Return the questions, a few of every card, kinds mixed."""
    ids = {token: at for at, token in enumerate(vocabulary())}
    cards = load_cards((("evaluation", CARDS),))
    return [
        Item(image, prompt_ids(asked[(card + 3 * turn) % len(asked)], ids))
        for card, (image, asked) in enumerate(zip(cards.images, cards.questions, strict=True))
        for turn in range(QUESTIONS_PER_CARD)
    ]


def build(submission: Path) -> CompiledBundle:
    """Compile EdgeCard version 1 for this machine."""
    target = host_target()
    if target is None:
        raise SystemExit(f"error: no target runs on this machine ({platform.machine()})")
    options = CompileOptions(target.id, "edgecard", "v1", cache_dir=CACHE)
    return compile_model(submission, options)


def answer_ours(session: Session, items: Sequence[Item]) -> list[Answer]:
    """Answer every question, each from the picture on."""
    answers = []
    for item in items:
        session.see(item.image.tobytes())
        answers.append(session.answer(item.prompt))
    return answers


def answer_theirs(model: ReferenceModel, items: Sequence[Item]) -> list[tuple[int, ...]]:
    """The same with ONNX Runtime."""
    return [tuple(model.answer(model.see(item.image), item.prompt)) for item in items]


def measure() -> list[Claim]:
    """Compile, run both candidates in turn, return the claims."""
    items = questions()
    with tempfile.TemporaryDirectory() as folder:
        submission = materialise("v1", Path(folder))
        bundle = build(submission)
        names = ("vision", "embed", "decoder")
        model = ReferenceModel({name: submission / f"{name}.onnx" for name in names}, threads=1)
    with NativePlan(bundle.sections["kernels"], bundle.sections["plan"], bundle.sections) as plan:
        return _claims(plan, bundle, model, items)


def _claims(
    plan: NativePlan, bundle: CompiledBundle, model: ReferenceModel, items: Sequence[Item]
) -> list[Claim]:
    session = Session(plan, parse_pipeline(bundle.sections["pipeline"]))
    ours, theirs = answer_ours(session, items), answer_theirs(model, items)
    same = sum(a.tokens == b for a, b in zip(ours, theirs, strict=True))
    tokens = sum(len(answer.tokens) + 1 for answer in ours)
    image = items[0].image
    whole = interleaved(
        {"ours": lambda: answer_ours(session, items), "ort": lambda: answer_theirs(model, items)},
        ROUNDS,
    )
    seeing = interleaved(
        {"ours": lambda: session.see(image.tobytes()), "ort": lambda: model.see(image)}, SEE_ROUNDS
    )
    steps = _steps(plan, model, image)
    note = f"{bundle.manifest.target}, {len(items)} questions, {CARDS} cards, {tokens} tokens"
    return [
        _claim("answer.edgecard.whole", whole, len(items), BAR, note),
        _claim("answer.edgecard.see", seeing, 1, None, "vision and prefill of one card"),
        _claim("answer.edgecard.step", steps, STEPS, None, "one token after one card"),
        Claim(
            id="answer.edgecard.same_answers",
            value=same / len(items),
            unit="share",
            peer=PEER,
            peer_version=onnxruntime.__version__,
            peer_value=None,
            ratio=None,
            bar=None,
            label="host",
            note="answers equal to the f32 model's, token by token",
        ),
    ]


def _steps(
    plan: NativePlan, model: ReferenceModel, image: NDArray[np.uint8]
) -> dict[str, list[float]]:
    """Time single-token steps after one card."""
    context = model.see(image)
    inputs = step_inputs((EOS,), POSITION_BASE)
    plan.kv_length = 0
    plan.run("see", {"image": image.tobytes()})
    seen = plan.kv_length

    def ours() -> None:
        for _ in range(STEPS):
            plan.kv_length = seen
            plan.run("step", inputs)

    def theirs() -> None:
        for _ in range(STEPS):
            model.step(context, (EOS,))

    return interleaved({"ours": ours, "ort": theirs}, ROUNDS)


def _claim(
    claim_id: str, seconds: Mapping[str, list[float]], runs: int, bar: float | None, note: str
) -> Claim:
    return faster_claim(
        claim_id,
        seconds["ours"],
        seconds["ort"],
        per=runs / MILLISECONDS,
        unit="ms",
        peer=PEER,
        peer_version=onnxruntime.__version__,
        bar=bar,
        label="host",
        note=note,
    )


if __name__ == "__main__":
    sys.exit(main("answer", measure, sys.argv[1:]))
