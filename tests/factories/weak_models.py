"""A tiny model asked its own answers, with heads and channels that matter to none of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from compiler.driver.cards import SCHEMA, Card, Question
from compiler.driver.provenance import CALIBRATION
from compiler.driver.removal_trials import RemovalTrials
from compiler.passes.pipeline import LOSSLESS
from tests.factories.attention_blocks import plant_weak
from tests.factories.cards import QUESTION
from tests.factories.onnx_models import TinyShape, tiny_document, tiny_models, write_submission

SHAPE = TinyShape(width=64, heads=4, kv_heads=4, hidden=64, layers=2, experts=2, vocabulary=24)
WEAK_HEADS = {0: (0, 1), 1: (2, 3)}
"""Per layer of the decoder; a head has 16 columns, and two are a group of 32.

Weights of this model are random numbers, whose answers any other rounding of a group would change.
"""
WEAK_CHANNELS = {0: tuple(range(32, 64)), 1: tuple(range(32))}


def prompted() -> dict[str, Any]:
    """Return the pipeline.json of a model that is asked questions of any words."""
    document = tiny_document(SHAPE)
    document["tokens"]["prompts"] = {name: list(words) for name, words in QUESTION.items()}
    return document


def write_weak(directory: Path) -> Path:
    """Write the model whose heads and channels above have next to no weight."""
    models = tiny_models(SHAPE)
    plant_weak(models["decoder"], SHAPE, WEAK_HEADS, WEAK_CHANNELS)
    return write_own(directory, models)


def write_own(directory: Path, models: Mapping[str, onnx.ModelProto]) -> Path:
    """Write models of the shape above as a submission without cards."""
    return write_submission(directory, models, prompted())


def cards_of(trials: RemovalTrials, count: int) -> list[Card]:
    """Return random pictures and, as expected answers, what the whole model answers in full."""
    random = np.random.default_rng(4)
    words = [f"w{at}" for at in range(4, SHAPE.vocabulary)]
    cards = []
    for _ in range(count):
        image = random.integers(0, 256, SHAPE.side**2).astype(np.uint8).tobytes()
        asked = [tuple(str(w) for w in random.choice(words, 2)) for _ in range(24)]
        cards.append(Card(image, tuple(Question("any", "question", one, ()) for one in asked)))
    answers = trials.answers(trials.module(LOSSLESS), cards)
    assert trials.spec.tokens is not None
    vocabulary = trials.spec.tokens.vocabulary
    return [
        replace(
            card,
            questions=tuple(
                replace(told.question, answer=tuple(vocabulary[at] for at in told.answer.tokens))
                for told in answers
                if told.card == number and told.answer.stopped
            ),
        )
        for number, card in enumerate(cards)
    ]


def write_cards(directory: Path, cards: Sequence[Card]) -> None:
    """Write cards as the calibration set of a submission."""
    document = {
        "schema": SCHEMA,
        "images": f"{CALIBRATION}.npz",
        "cards": [
            {
                "image": at,
                "questions": [
                    {
                        "kind": question.kind,
                        "prompt": question.prompt,
                        "words": list(question.words),
                        "answer": list(question.answer),
                    }
                    for question in card.questions
                ],
            }
            for at, card in enumerate(cards)
        ],
    }
    (directory / f"{CALIBRATION}.json").write_text(json.dumps(document))
    rows = [np.frombuffer(card.image, np.uint8).reshape(SHAPE.side, -1) for card in cards]
    np.savez(directory / f"{CALIBRATION}.npz", images=np.stack(rows))
