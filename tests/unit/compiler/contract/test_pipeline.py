"""The pipeline section: words, prompts, limits and ports."""

import json
from dataclasses import replace

import pytest

from compiler.contract.errors import ContractError
from compiler.contract.pipeline import (
    ImageSpec,
    Pipeline,
    Port,
    ProgramSpec,
    TokenSpec,
    parse_pipeline,
)

TOKENS = TokenSpec(
    vocabulary=("<pad>", "<eos>", "<q>", "<a>", "<cap>", "what", "là"),
    eos=1,
    position_base=64,
    prompts={"caption": ("<cap>",), "question_prefix": ("<q>",), "question_suffix": ("<a>",)},
    max_answer_tokens=4,
)
PIPELINE = Pipeline(
    family="vision-embed-decoder",
    image=ImageSpec(2, 3, 1),
    tokens=TOKENS,
    max_context=16,
    max_step_tokens=8,
    programs={
        "see": ProgramSpec({"image": Port(1, 6, "u8", False)}, {}),
        "step": ProgramSpec(
            {"token_ids": Port(8, 1, "i32", True), "positions": Port(8, 1, "i32", True)},
            {"token": Port(1, 1, "i32", False)},
        ),
    },
)


def _edited(path: str, value) -> bytes:
    document = json.loads(PIPELINE.to_bytes())
    place = document
    *parents, last = path.split("/")
    for name in parents:
        place = place[name]
    place[last] = value
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_it_round_trips() -> None:
    assert parse_pipeline(PIPELINE.to_bytes()) == PIPELINE


def test_it_round_trips_a_grid_that_is_no_square() -> None:
    wide = replace(PIPELINE, image=ImageSpec(4, 6, 1, grid=(2, 3)))
    assert parse_pipeline(wide.to_bytes()) == wide
    assert b"grid" not in PIPELINE.to_bytes()  # so that agents without the field read the section


@pytest.mark.parametrize("grid", [[2, 2], [2], [2, 3, 4], [0, 3], "2x3", None, [2, 2.5]])
def test_it_refuses_a_grid_that_is_none(grid: object) -> None:
    with pytest.raises(ContractError):
        parse_pipeline(_edited("image/grid", grid))


def test_it_round_trips_a_graph_without_words_and_pictures() -> None:
    graph = Pipeline(
        "graph",
        None,
        None,
        0,
        8,
        {"forward": ProgramSpec({"tensor": Port(8, 32, "f32", True)}, {})},
    )
    assert parse_pipeline(graph.to_bytes()) == graph


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", "sparsefleet.pipeline-section/9"),
        ("family", "audio"),
        ("extra", 1),
        ("image", {"height": 0, "width": 1, "channels": 1}),
        ("image", {"height": 1, "width": 1, "channels": 5}),
        ("image", 3),
        ("tokens/eos", 7),
        ("tokens/eos", -1),
        ("tokens/vocabulary", []),
        ("tokens/vocabulary", ["a", "a"]),
        ("tokens/vocabulary", ["a", ""]),
        ("tokens/vocabulary", ["a", 1]),
        ("tokens/prompts", {"caption": ["<nothing>"]}),
        ("tokens/prompts", {"caption": "<cap>"}),
        ("tokens/prompts", []),
        ("tokens/max_answer_tokens", 0),
        ("limits", {"max_context": 1}),
        ("limits/max_step_tokens", 0),
        ("programs", {}),
        ("programs/see", {"inputs": {}}),
        ("programs/see/inputs/image", [1, 6, "f64", False]),
        ("programs/see/inputs/image", [1, 6, "u8", 0]),
        ("programs/see/inputs/image", [0, 6, "u8", False]),
        ("programs/see/inputs/image", [1, 6, "u8"]),
        ("programs/see/inputs", {str(n): [1, 1, "u8", False] for n in range(17)}),
    ],
)
def test_it_refuses_a_broken_field(path, value) -> None:
    with pytest.raises(ContractError):
        parse_pipeline(_edited(path, value))


def test_it_refuses_a_form_that_is_not_canonical() -> None:
    with pytest.raises(ContractError, match="canonical"):
        parse_pipeline(json.dumps(json.loads(PIPELINE.to_bytes())).encode())


def test_it_makes_prompts_from_words() -> None:
    assert TOKENS.prompt("caption") == [4]
    assert TOKENS.prompt("question", ["what", "là"]) == [2, 5, 6, 3]
    assert TOKENS.words([6, 5]) == ["là", "what"]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("question", ["who"], "who"),
        ("caption", ["what"], "takes no words"),
        ("story", [], "no prompt 'story'"),
    ],
)
def test_it_says_what_is_wrong_with_a_prompt(name, words, message) -> None:
    with pytest.raises(ContractError, match=message):
        TOKENS.prompt(name, words)


def _pruned(**see: Port) -> Pipeline:
    """The pipeline with a picture that keeps 1 to 5 tokens of 4 floats."""
    outputs = {
        "tokens": Port(5, 4, "f32", False),
        "positions": Port(5, 1, "i32", False),
        "count": Port(1, 1, "i32", False),
        **see,
    }
    prefill = {"tokens": Port(8, 4, "f32", True), "positions": Port(8, 1, "i32", True)}
    programs = {
        **PIPELINE.programs,
        "see": ProgramSpec(PIPELINE.programs["see"].inputs, outputs),
        "prefill": ProgramSpec(prefill, {"embeds": Port(8, 4, "f32", True)}),
    }
    return replace(PIPELINE, programs=programs)


PRUNED = _pruned()


def test_it_takes_a_prefill_of_the_rows_that_see_counts() -> None:
    assert parse_pipeline(PRUNED.to_bytes()) == PRUNED


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (_pruned(count=Port(1, 1, "f32", False)), "needs the 'count'"),
        (_pruned(count=Port(2, 1, "i32", False)), "needs the 'count'"),
        (_pruned(tokens=Port(5, 3, "f32", False)), "do not fit"),
        (_pruned(positions=Port(5, 1, "f32", False)), "do not fit"),
        (_pruned(tokens=Port(8, 4, "f32", True)), "no rows 'tokens'"),
        (replace(PRUNED, programs=PRUNED.programs | {"see": PIPELINE.programs["see"]}), "needs"),
    ],
)
def test_it_refuses_a_prefill_that_see_does_not_feed(pipeline: Pipeline, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        parse_pipeline(pipeline.to_bytes())
