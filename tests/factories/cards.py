"""Calibration sets of random pictures for models whose answers nobody has to like."""

import json
from pathlib import Path

import numpy as np

from compiler.driver.cards import SCHEMA
from compiler.driver.provenance import CALIBRATION
from compiler.passes.pipeline_spec import PipelineSpec

QUESTION = {"question_prefix": ("w2",), "question_suffix": ("w3",)}
"""Prompts of the tiny vocabularies in `factories.families`."""


def write_calibration(submission: Path, spec: PipelineSpec, cards: int = 8) -> None:
    """Write `calibration.json` and `.npz`: two random questions about each random picture."""
    assert spec.image is not None
    assert spec.tokens is not None
    random = np.random.default_rng(7)
    size = (cards, spec.image.height, spec.image.width, spec.image.channels)
    words = [word for word in spec.tokens.vocabulary if word.startswith("w")]

    def question() -> dict[str, object]:
        chosen = [str(word) for word in random.choice(words, 4)]
        return {"kind": "any", "prompt": "question", "words": chosen[:3], "answer": chosen[3:]}

    document = {
        "schema": SCHEMA,
        "images": f"{CALIBRATION}.npz",
        "cards": [{"image": at, "questions": [question(), question()]} for at in range(cards)],
    }
    (submission / f"{CALIBRATION}.json").write_text(json.dumps(document))
    images = random.integers(0, 256, size).astype(np.uint8)
    np.savez(submission / f"{CALIBRATION}.npz", images=images)
