"""`evaluate`: how often a bundle answers a set of questions as expected."""

import argparse
from pathlib import Path

from compiler.driver.bundle_files import read_bundle
from compiler.driver.commands.base import Answer, Command, Console, table
from compiler.driver.evaluate import Scores, evaluate_bundle


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory written by `compile`")
    parser.add_argument("cards", type=Path, help="directory with evaluation.json and .npz")
    parser.add_argument("--set", default="evaluation", help="stem of the files")
    parser.add_argument("--cards", dest="most", type=int, default=0, help="at most so many")
    parser.add_argument("--simulator", action="store_true", help="instead of native code")


def _run(options: argparse.Namespace, console: Console) -> Answer:
    _, sections = read_bundle(options.bundle)
    console.progress("questions", 0.0)
    scores = evaluate_bundle(
        sections,
        options.cards,
        stem=options.set,
        most_cards=options.most or None,
        in_simulator=options.simulator,
    )
    return Answer(_lines(scores), scores.to_json())


def _lines(scores: Scores) -> list[str]:
    rows = [(f"  {kind}", f"{share:.1%}") for kind, share in scores.accuracy_by_kind.items()]
    return [
        f"{scores.accuracy:.1%} of {scores.questions} questions about {scores.cards} cards"
        " answered as expected",
        *table(rows, right=frozenset({1})),
        f"{scores.mean_answer_tokens:.2f} tokens an answer (99 % have at most"
        f" {scores.p99_answer_tokens}), {scores.cut_off_ratio:.1%} cut off, {scores.calls} calls",
    ]


COMMAND = Command(
    description="Ask a bundle an evaluation set and print how often it was right.",
    example="evaluate build/my-model examples/my-model --cards 20",
    add_arguments=_arguments,
    run=_run,
)
