"""`evaluate`: how often a bundle answers a set of questions as expected."""

import argparse
from pathlib import Path

from compiler.driver.bundle_files import read_bundle
from compiler.driver.commands.base import Answer, Command, Console, positive, table
from compiler.driver.evaluate import Scores, evaluate_bundle, require_answers


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory written by `compile`")
    parser.add_argument("cards", type=Path, help="directory with evaluation.json and .npz")
    parser.add_argument("--set", default="evaluation", help="stem of the files")
    parser.add_argument("--cards", dest="most", type=positive, help="at most so many, else all")
    parser.add_argument("--simulator", action="store_true", help="instead of native code")


def _run(options: argparse.Namespace, console: Console) -> Answer:
    _, sections = read_bundle(options.bundle)
    require_answers(sections)
    console.progress("questions", 0.0)
    scores = evaluate_bundle(
        sections,
        options.cards,
        stem=options.set,
        most_cards=options.most,
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
    description=(
        "Ask a bundle an evaluation set and print how often it was right. For bundles that answer\n"
        "questions about pictures; `simulate` runs any bundle on inputs of your own."
    ),
    example="evaluate build/my-model examples/my-model --cards 20",
    add_arguments=_arguments,
    run=_run,
)
