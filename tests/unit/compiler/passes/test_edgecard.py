"""EdgeCard, whole: it raises completely, names do not matter, and it answers as recorded."""

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compiler.driver.onnx_backend import OnnxFiles
from compiler.emitters.memory import plan_memory
from compiler.kernels.program import KvCache, Module
from compiler.passes.pipeline import LoweredPipeline
from compiler.simulator import Simulator
from examples.edgecard.materialise import HERE, materialise
from tests.factories.onnx_models import disguise_submission, write_submission
from tests.factories.onnx_runs import lowered

TEXT_BASE = 64
EOS = 2
LIMIT = 24


@pytest.fixture(scope="module")
def edgecard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise("v1", tmp_path_factory.mktemp("edgecard"))


@pytest.fixture(scope="module")
def pipeline(edgecard: Path) -> LoweredPipeline:
    return lowered(edgecard)


def test_it_raises_completely(pipeline: LoweredPipeline) -> None:
    for stage in ("raised", "programs", "kernels"):
        assert "sp.onnx" not in pipeline.ir_text[stage]
    assert "sp.transpose" not in pipeline.ir_text["programs"]
    assert pipeline.module.kv == KvCache(layers=4, heads=4, head_dim=32, capacity=256)


def test_it_uses_the_kernels_one_expects(edgecard: Path) -> None:
    unfused = lowered(edgecard, fuse=False)
    see, step = (Counter(c.op.name for c in p.calls) for p in unfused.module.programs)
    assert (see["CONV2D"], see["ATTENTION"], see["PRUNE"], see["EXPERTS"]) == (3, 7, 1, 3)
    assert (step["EMBED"], step["ROPE"], step["ATTENTION"], step["EXPERTS"]) == (1, 8, 4, 4)
    assert step["LINEAR"] == 17
    assert "LINEAR_F32" not in see | step


def test_it_fuses_what_belongs_together(pipeline: LoweredPipeline) -> None:
    see, step = (Counter(c.op.name for c in p.calls) for p in pipeline.module.programs)
    assert (see["LINEAR"], see["ATTENTION"], see["MOE_LAYER"]) == (21, 7, 3)
    assert (step["LINEAR"], step["ATTENTION"], step["MOE_LAYER"]) == (10, 4, 4)
    assert not {"ROPE", "ROUTE", "EXPERTS"} & set(see | step)


def test_it_puts_every_expert_into_its_own_section(pipeline: LoweredPipeline) -> None:
    sections = Counter(w.section for w in pipeline.module.weights if w.kind == "w4")
    experts = {f"expert.L{layer}.E{e}" for layer in range(4) for e in range(16)}
    assert set(sections) - {"weights.shared"} == experts
    assert all(sections[name] == 2 for name in experts)


def test_it_lowers_renamed_and_reordered_files_to_the_same_module(
    edgecard: Path, pipeline: LoweredPipeline, tmp_path: Path
) -> None:
    document = json.loads((edgecard / "pipeline.json").read_text())
    models = {name: onnx.load(edgecard / f"{name}.onnx") for name in document["components"]}
    disguised = disguise_submission(models, document, seed=7)
    other = lowered(write_submission(tmp_path, *disguised))
    assert dict(other.ir_text) == dict(pipeline.ir_text)
    assert fingerprint(other.module) == fingerprint(pipeline.module)


def fingerprint(module: Module) -> tuple[Any, ...]:
    weights = [(w.id, w.kind, w.section, w.array.shape, w.array.tobytes()) for w in module.weights]
    return (module.programs, module.buffers, module.kv, module.max_tokens, weights)


class Reader:
    """Answers in the f64 interpreter, beside ONNX Runtime."""

    def __init__(self, directory: Path, module: Module) -> None:
        self.simulator = Simulator(module, mode="f64")
        self.reference = OnnxFiles(directory)
        self.greatest_difference = 0.0

    def see(self, pixels: np.ndarray) -> list[int]:
        self.simulator.kv_length = 0
        seen = self.simulator.run_arrays("see", {"image": pixels.reshape(1, -1)})
        tokens, kept = self.reference.see(pixels)
        assert np.abs(seen["embeds"] - tokens).max() < 1e-3
        assert seen["positions"][:, 0].tolist() == kept.tolist()
        self.prefix = (self.simulator.kv_length, self.reference.cache)
        return kept.tolist()

    def answer(self, prompt: list[int]) -> tuple[list[int], list[list[list[int]]]]:
        self.simulator.kv_length, self.reference.cache = self.prefix
        position, fed, answer, routes = TEXT_BASE, prompt, [], []
        while len(answer) < LIMIT:
            ids, positions = np.array(fed), np.arange(position, position + len(fed))
            inputs = {"token_ids": ids[:, None], "positions": positions[:, None]}
            found = self.simulator.run_arrays("step", inputs)
            logits, _ = self.reference.step(ids, positions)
            difference = float(np.abs(found["logits"][0] - logits).max())
            self.greatest_difference = max(self.greatest_difference, difference)
            routes.append(found["routing"].reshape(-1, 2).tolist())
            position += len(fed)
            token = int(found["token"][0, 0])
            if token == EOS:
                break
            answer.append(token)
            fed = [token]
        return answer, routes


def check_traces(directory: Path, module: Module, count: int) -> None:
    traces = json.loads((HERE / "golden_v1.json").read_text())[:count]
    images = np.load(HERE / "data" / "evaluation.npz")["images"]
    reader = Reader(directory, module)
    for card, group in groupby(traces, key=lambda trace: trace["card"]):
        questions = list(group)
        assert reader.see(images[card]) == questions[0]["keep_idx"]
        for question in questions:
            expected = (question["answer"], question["topk_last"])
            assert reader.answer(question["prompt"]) == expected
    assert reader.greatest_difference <= 1e-3


def test_it_answers_token_for_token(edgecard: Path, pipeline: LoweredPipeline) -> None:
    check_traces(edgecard, pipeline.module, 6)


@pytest.mark.full
def test_it_answers_every_recorded_question(edgecard: Path, pipeline: LoweredPipeline) -> None:
    check_traces(edgecard, pipeline.module, 48)


def test_it_answers_text_without_an_image(edgecard: Path, pipeline: LoweredPipeline) -> None:
    reader = Reader(edgecard, pipeline.module)
    reader.simulator.kv_length, reader.prefix = 0, (0, None)
    answer, _ = reader.answer([3, 30, 4])
    assert len(answer) <= LIMIT
    assert reader.greatest_difference <= 1e-3


def test_its_arena_is_within_five_percent_of_the_bound(pipeline: LoweredPipeline) -> None:
    plan = plan_memory(pipeline.module)
    assert plan.max_live_bytes <= plan.arena_bytes <= 1.05 * plan.max_live_bytes
    assert plan.kv_bytes == 2 * 4 * 4 * 128 * 256
    assert set(plan.programs) == {"see", "step"}
