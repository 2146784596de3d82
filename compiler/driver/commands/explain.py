"""`explain`: what was found in a model, what became of it, and what it costs."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiler.driver.bundle_files import read_bundle, read_report
from compiler.driver.commands.base import Answer, Command, Console


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory written by `compile`")


def _run(options: argparse.Namespace, console: Console) -> Answer:  # noqa: ARG001 - one signature
    manifest, _ = read_bundle(options.bundle)
    report = read_report(options.bundle)
    lines = [
        f"{manifest.model} {manifest.version} for {manifest.target}, {manifest.total_bytes} bytes",
        f"verified on {manifest.verified_on}: {json.dumps(report['native_check'])}",
    ]
    lines += [
        f"  {row['name']:<10} {row['seconds']:>8.3f} s{'  cached' * row['cached']}"
        for row in report["stages"]
    ]
    lines += [_kernel_line(row) for row in report["explain"]]
    lines += [
        f"  {name:<24} {decibel:>6.2f} dB"
        for name, decibel in sorted(report["sqnr_db"].items(), key=lambda item: item[1])[:8]
    ]
    lines.append(f"experts per layer: {json.dumps(report['experts'])}")
    return Answer(lines, report)


def _kernel_line(row: Mapping[str, Any]) -> str:
    calls = ", ".join(f"{name} {count}" for name, count in row["calls"].items())
    return (
        f"  {row['operation']:<14} {row['kernel']:<42} {row['weight_bytes']:>9} B"
        f"  {calls}  ({row['why']})"
    )


COMMAND = Command(
    description="Say how a bundle was made.",
    example="explain build/my-model",
    add_arguments=_arguments,
    run=_run,
)
