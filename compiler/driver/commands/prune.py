"""`prune`: find how far a submission's pictures can be pruned without losing accuracy."""

import argparse
import json
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json
from compiler.driver.choose_pruning import (
    MAX_LOSS,
    MERGES,
    SHARES,
    PruneChoice,
    PruneTrial,
    choose_pruning,
    rule_json,
    sweep,
)
from compiler.driver.commands.base import Answer, Command, Console, positive, table
from compiler.driver.native_check import runs_here
from compiler.driver.provenance import CALIBRATION
from compiler.errors import UsageError
from compiler.frontend.pipeline_json import LEAST_MASS
from compiler.hardware.targets import find_target

_HEAD: Final = ("p", "merge", "score", "rows", "least", "most", "accuracy")
_NUMBERS: Final = frozenset({0, 1, 3, 4, 5, 6})


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submission", type=Path, help="directory with pipeline.json and cards")
    parser.add_argument("--target", required=True, help="one that this machine can run")
    parser.add_argument("--set", default=CALIBRATION, help="stem of the cards to choose by")
    parser.add_argument("--cards", dest="most", type=positive, help="at most so many, else all")
    parser.add_argument(
        "--max-loss", type=float, default=MAX_LOSS, help=f"share of accuracy, default {MAX_LOSS}"
    )
    parser.add_argument(
        "--p", type=float, nargs="+", default=SHARES, help="shares of attention to keep"
    )
    parser.add_argument("--merge", type=int, nargs="+", default=MERGES, help="context tokens")
    parser.add_argument("--min-keep", type=int, default=8, help="fewest tokens, default 8")
    parser.add_argument(
        "--score",
        choices=("row", "mean"),
        default="row",
        help="attention of the class token, or all",
    )
    parser.add_argument("--cache", type=Path, help="directory for kernel libraries")


def _run(options: argparse.Namespace, console: Console) -> Answer:
    target = find_target(options.target)
    if not runs_here(target):
        raise UsageError(
            f"this machine cannot run {target.id}",
            hint="`targets` says which ones it can; the choice holds for all of them",
        )
    if not all(LEAST_MASS <= p <= 1.0 for p in options.p) or min(options.merge) < 0:
        raise UsageError("--p must be in (0, 1], --merge not negative")
    if options.min_keep < 1 or options.max_loss < 0.0:
        raise UsageError("--min-keep starts at 1, --max-loss at 0")
    choice = choose_pruning(
        options.submission,
        target,
        stem=options.set,
        rules=sweep(options.p, options.merge, options.min_keep, options.score),
        max_loss=options.max_loss,
        most_cards=options.most,
        cache_dir=options.cache,
        progress=console.progress,
    )
    return Answer(_lines(choice), _document(choice))


def _lines(choice: PruneChoice) -> list[str]:
    cells = [_HEAD, *(_cells(trial) for trial in (choice.unpruned, *choice.trials))]
    rows = table(cells, right=_NUMBERS)
    if choice.chosen is None:
        return [*rows, "every rule loses more than that: leave the pictures as they are"]
    rule = json.dumps(rule_json(choice.chosen.rule))
    return [*rows, "", "for pipeline.json:", f'  "prune": {rule}']


def _cells(trial: PruneTrial) -> tuple[object, ...]:
    rule, rows = trial.rule, f"{trial.mean_rows:.1f}"
    counts = (rows, trial.least_rows, trial.most_rows)
    return (f"{rule.p:g}", rule.merge, rule.score, *counts, f"{trial.accuracy:.4f}")


def _document(choice: PruneChoice) -> dict[str, Json]:
    return {
        "unpruned": _trial_json(choice.unpruned),
        "trials": [_trial_json(trial) for trial in choice.trials],
        "chosen": _trial_json(choice.chosen) if choice.chosen else None,
    }


def _trial_json(trial: PruneTrial) -> dict[str, Json]:
    return {
        "prune": rule_json(trial.rule),
        "accuracy": round(trial.accuracy, 4),
        "mean_rows": round(trial.mean_rows, 2),
        "least_rows": trial.least_rows,
        "most_rows": trial.most_rows,
    }


COMMAND = Command(
    description="Try rules of adaptive pruning on calibration cards, natively, and choose the one\n"
    "that keeps the fewest tokens within the allowed loss of accuracy.",
    example="prune examples/my-model --target x86-64-v3 --p 0.8 0.85 0.9 --merge 0 4",
    add_arguments=_arguments,
    run=_run,
)
