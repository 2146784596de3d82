"""EdgeCard fused and unfused: the same bytes, natively and in the simulator, in half the calls."""

from pathlib import Path

import numpy as np
import pytest

from compiler.kernels.program import Module
from examples.edgecard.materialise import HERE, materialise
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.onnx_runs import lowered

PROMPT = [3, 30, 4]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Case]:
    directory: Path = materialise("v1", tmp_path_factory.mktemp("edgecard"))
    return {fuse: Case.of(lowered(directory, fuse=fuse).module) for fuse in (True, False)}


def conversation(runner) -> list[dict[str, bytes]]:  # type: ignore[no-untyped-def]
    """See a card, ask about it in one chunk, then go on token by token."""
    image = np.load(HERE / "data" / "evaluation.npz")["images"][3].reshape(1, -1)
    found = [raw(runner.run("see", {"image": image}))]
    step = {"token_ids": ids(PROMPT), "positions": ids(range(64, 64 + len(PROMPT)))}
    found.append(raw(runner.run("step", step)))
    for at in range(4):
        token = int(np.frombuffer(found[-1]["token"], "<i4")[0])
        step = {"token_ids": ids([token]), "positions": ids([64 + len(PROMPT) + at])}
        found.append(raw(runner.run("step", step)))
    return found


def test_fused_and_unfused_give_the_same_bytes(cases: dict[bool, Case]) -> None:
    expected = conversation(cases[False].simulator())
    assert conversation(cases[True].simulator()) == expected
    for target in native_targets():
        for case in cases.values():
            with case.native(target) as plan:
                assert conversation(plan) == expected, target


def test_fusion_halves_the_calls(cases: dict[bool, Case]) -> None:
    def count(module: Module) -> dict[str, int]:
        return {program.name: len(program.calls) for program in module.programs}

    assert count(cases[False].module) == {"see": 80, "step": 58}
    assert count(cases[True].module) == {"see": 41, "step": 27}
