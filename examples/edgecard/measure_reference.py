"""Measure EdgeCard with ONNX Runtime in f32: the accuracies that a CI system would claim.

    python -m examples.edgecard.measure_reference            # rewrites reference.json
    python -m examples.edgecard.measure_reference --check    # measures again, exit 1 if it differs

Two ways to score a version, both over the evaluation set that its submission ships:

- `greedy`: the model answers by itself until `<eos>` or the limit; an answer counts when it equals
  the expected one. This is what a device sees.
- `teacher_forced`: the expected words are fed in one pass; the figures are the mean cross-entropy
  over the expected words (`word_loss`, nats), the share of them that are the most probable
  (`word_accuracy`) and the share of questions all of whose words are (`answer_accuracy`); then the
  first two again with the closing `<eos>` counted in (`sequence_loss`, `sequence_accuracy`). This
  is what a training job watches, and it never runs the model freely.

CI's `claim` is `teacher_forced.answer_accuracy` for every version: it equals the greedy figure as
long as the model knows when to stop, and says nothing about whether it does.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from examples.edgecard.materialise import (
    EOS,
    HERE,
    MAX_ANSWER_TOKENS,
    VERSIONS,
    Cards,
    embed_graph,
    fill_graph,
    load_cards,
    load_weights,
    vocabulary,
)

POSITION_BASE: Final = 64
MASKED: Final = np.float32(-1e9)
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Context:
    """What was seen so far.

    Attributes:
        keys, values: (layers, 1, heads, n, head_dim) f32.
        position: Position of the next text token.
    """

    keys: F32
    values: F32
    position: int


class ReferenceModel:
    """EdgeCard in ONNX Runtime, f32, one thread unless told otherwise."""

    def __init__(self, files: Mapping[str, Path | bytes], threads: int = 1) -> None:
        """Open `vision`, `embed` and `decoder`, given as paths or model bytes."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._sessions = {
            name: onnxruntime.InferenceSession(
                bytes(file) if isinstance(file, bytes) else str(file),
                options,
                providers=["CPUExecutionProvider"],
            )
            for name, file in files.items()
        }
        self._lambda = np.array(0.0, np.float32)

    def see(self, image: NDArray[np.uint8]) -> Context:
        """Run vision and the decoder's prefill over the kept tokens. image: (64, 64) u8."""
        pixels = (image.astype(np.float32) / 127.5 - 1.0)[None, None]
        tokens, kept, _ = self._sessions["vision"].run(None, {"image": pixels})
        empty = np.zeros((4, 1, 4, 0, 32), np.float32)
        _, keys, values = self._decode(tokens, kept, empty, empty)
        return Context(keys, values, POSITION_BASE)

    def step(self, context: Context, ids: Sequence[int]) -> tuple[F32, Context]:
        """Feed `ids`; return logits (len(ids), vocabulary) f32 and the longer context."""
        embeds = self._sessions["embed"].run(None, {"ids": np.array([ids], np.int64)})[0]
        positions = np.arange(context.position, context.position + len(ids))[None]
        logits, keys, values = self._decode(embeds, positions, context.keys, context.values)
        return logits[0], Context(keys, values, context.position + len(ids))

    def answer(
        self, context: Context, prompt: Sequence[int], limit: int = MAX_ANSWER_TOKENS
    ) -> list[int]:
        """Answer greedily until `<eos>` (not returned) or `limit` tokens."""
        out: list[int] = []
        feed: Sequence[int] = prompt
        while len(out) < limit:
            logits, context = self.step(context, feed)
            token = int(logits[-1].argmax())
            if token == EOS:
                break
            out.append(token)
            feed = [token]
        return out

    def _decode(
        self, embeds: F32, positions: NDArray[np.int64], keys: F32, values: F32
    ) -> tuple[F32, F32, F32]:
        new, past = embeds.shape[1], keys.shape[3]
        mask = np.zeros((1, 1, new, past + new), np.float32)
        if new > 1:  # a single token sees everything before it
            mask[0, 0] = np.triu(np.full((new, past + new), MASKED, np.float32), past + 1)
        feeds = {
            "embeds": embeds,
            "position_ids": positions,
            "attn_bias": mask,
            "modality_lambda": self._lambda,
            "past_k": keys,
            "past_v": values,
        }
        logits, new_keys, new_values = self._sessions["decoder"].run(
            ["logits", "present_k", "present_v"], feeds
        )
        return logits, new_keys, new_values


def reference_model(version: str, threads: int = 1) -> ReferenceModel:
    """Return `version` ready to run."""
    tensors = load_weights(version)
    files: dict[str, Path | bytes] = {
        name: fill_graph(name, tensors).SerializeToString() for name in ("vision", "decoder")
    }
    return ReferenceModel({**files, "embed": embed_graph(tensors).SerializeToString()}, threads)


def prompt_ids(question: Mapping[str, Any], ids: Mapping[str, int]) -> list[int]:
    """Return the prompt of a question as token ids."""
    if question["prompt"] == "caption":
        return [ids["<cap>"]]
    return [ids["<q>"], *(ids[word] for word in question["words"]), ids["<a>"]]


def measure(model: ReferenceModel, cards: Cards) -> dict[str, Any]:
    """Return both kinds of scores of `model` over `cards`."""
    ids = {token: index for index, token in enumerate(vocabulary())}
    right: dict[str, list[bool]] = {}
    lengths: list[int] = []
    losses: list[F32] = []
    hits: list[NDArray[np.bool_]] = []
    for image, questions in zip(cards.images, cards.questions, strict=True):
        context = model.see(image)
        for question in questions:
            prompt, expected = prompt_ids(question, ids), [ids[word] for word in question["answer"]]
            answer = model.answer(context, prompt)
            right.setdefault(question["kind"], []).append(answer == expected)
            lengths.append(len(answer))
            loss, hit = _teacher_forced(model, context, prompt, expected)
            losses.append(loss)
            hits.append(hit)
    return {
        "greedy": _greedy_scores(right, lengths),
        "teacher_forced": _forced_scores(losses, hits),
    }


def _teacher_forced(
    model: ReferenceModel, context: Context, prompt: list[int], expected: list[int]
) -> tuple[F32, NDArray[np.bool_]]:
    """Return loss and hit of each expected word and of the closing `<eos>`, (words + 1) each."""
    logits, _ = model.step(context, [*prompt, *expected])
    rows = logits[len(prompt) - 1 :].astype(np.float64)
    targets = np.array([*expected, EOS])
    peak = rows.max(axis=1)
    log_total = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    loss = (log_total - rows[np.arange(len(targets)), targets]).astype(np.float32)
    return loss, rows.argmax(axis=1) == targets


def _greedy_scores(right: Mapping[str, list[bool]], lengths: list[int]) -> dict[str, Any]:
    visual = [item for kind, items in right.items() if kind != "caption" for item in items]
    every = [item for items in right.values() for item in items]
    return {
        "questions": len(every),
        "accuracy": _ratio(every),
        "visual_questions_accuracy": _ratio(visual),
        "accuracy_by_kind": {kind: _ratio(items) for kind, items in sorted(right.items())},
        "mean_answer_tokens": round(float(np.mean(lengths)), 3),
        "p99_answer_tokens": float(np.percentile(lengths, 99)),
        "cut_off_ratio": _ratio([length >= MAX_ANSWER_TOKENS for length in lengths]),
    }


def _forced_scores(losses: list[F32], hits: list[NDArray[np.bool_]]) -> dict[str, float]:
    return {
        "word_loss": round(float(np.concatenate([item[:-1] for item in losses]).mean()), 4),
        "word_accuracy": _ratio(np.concatenate([item[:-1] for item in hits])),
        "answer_accuracy": _ratio([bool(item[:-1].all()) for item in hits]),
        "sequence_loss": round(float(np.concatenate(losses).mean()), 4),
        "sequence_accuracy": _ratio(np.concatenate(hits)),
    }


def _ratio(items: Sequence[bool] | NDArray[np.bool_]) -> float:
    return round(float(np.mean(items)), 4)


def measure_all() -> dict[str, Any]:
    """Measure every version over the evaluation set that it ships, and form CI's claims."""
    measured = {
        version: measure(reference_model(version), load_cards(spec.evaluation))
        for version, spec in VERSIONS.items()
    }
    return {
        "schema": "sparsefleet.edgecard-reference/1",
        "made_by": "python -m examples.edgecard.measure_reference",
        "runtime": f"onnxruntime {onnxruntime.__version__} f32",
        "measured": measured,
        "claims": {version: _claim(version, scores) for version, scores in measured.items()},
    }


def _claim(version: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "metric": "teacher_forced.answer_accuracy",
        "value": scores["teacher_forced"]["answer_accuracy"],
        "loss": scores["teacher_forced"]["word_loss"],
        "cards": sum(count for _, count in VERSIONS[version].evaluation),
        "questions": scores["greedy"]["questions"],
        "runtime": f"onnxruntime {onnxruntime.__version__} f32",
    }


def main() -> int:
    """Measure; write or compare `reference.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.edgecard.measure_reference", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="compare with reference.json instead")
    arguments = parser.parse_args()
    text = json.dumps(measure_all(), indent=1, sort_keys=True) + "\n"
    path = HERE / "reference.json"
    if arguments.check:
        same = path.read_text() == text
        print("reference.json holds" if same else "error: reference.json is out of date")
        return 0 if same else 1
    path.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
