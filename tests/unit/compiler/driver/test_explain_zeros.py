"""Pruned weights and likely zeros through the commands: what is chosen, why, what runs found."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import Kind
from compiler.driver import cli
from compiler.driver.native_check import runs_here
from compiler.hardware.targets import find_target
from tests.factories.onnx_blocks import GraphBuilder
from tests.factories.onnx_models import write_block

TARGET = "x86-64-v1"
HIDDEN = 256
BUDGET = 1024


def gated(bias: float) -> Callable[[GraphBuilder, str], str]:
    """Return two layers; a bias decides whether most of the hidden units ever pass the ReLU."""

    def block(b: GraphBuilder, x: str) -> str:
        biases = np.full(HIDDEN, bias, np.float32)
        biases[:16] = 1.0
        up = b.op("Add", b.op("MatMul", x, b.weight(8, HIDDEN)), b.const(biases))
        return b.op("MatMul", b.op("Relu", up), b.weight(HIDDEN, 96))

    return block


def pruned(b: GraphBuilder, x: str) -> str:
    """Two layers, the second with 8 of 1,000 weights left."""
    live = b.rng.random((HIDDEN, 1024)) < 0.008
    up = b.op("MatMul", x, b.weight(8, HIDDEN))
    return b.op("MatMul", up, b.const(b.rng.standard_normal(live.shape) * live))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Callable[..., tuple[Path, dict]]:
    """Return a function that compiles a block and returns its bundle and what `explain` says."""
    root = tmp_path_factory.mktemp("zeros")

    def run(name: str, block: Callable[[GraphBuilder, str], str], *options: str) -> Path:
        source, out = root / f"{name}-submission", root / name
        write_block(source, block)
        arguments = [str(source), "--target", TARGET, "--out", str(out), *options]
        assert cli.main(["compile", *arguments, "--cache", str(root / "cache")]) == cli.OK
        return out

    return run


def explained(capsys, bundle: Path, *options: str) -> tuple[dict, str]:
    """Return what `explain` says as a document and as text."""
    capsys.readouterr()
    assert cli.main(["explain", str(bundle), *options, "--json"]) == cli.OK
    document = json.loads(capsys.readouterr().out)
    assert cli.main(["explain", str(bundle), *options]) == cli.OK
    return document, capsys.readouterr().out


@pytest.mark.skipif(not runs_here(find_target(TARGET)), reason="another machine's code")
@pytest.mark.parametrize(("bias", "holds"), [(-100.0, True), (1.0, False)])
def test_explain_counts_how_often_a_claim_held(capsys, compiled, bias: float, holds: bool) -> None:
    bundle = compiled(f"gated{holds}", gated(bias))
    document, text = explained(capsys, bundle, "--measure")
    checks = [
        (call["call"], call["check"])
        for call in document["explained"]["programs"]["forward"]["calls"]
        if call["check"]
    ]
    ((at, check),) = checks
    assert (check["most_live_groups"], check["groups"]) == (7, 8)
    counted = (check["held"], check["broken"])
    runs = check["held"] + check["broken"]
    assert counted == ((runs, 0) if holds else (0, runs))
    assert runs >= 16
    assert [row["call"] for row in document["checks"]] == [at]
    (line,) = [line for line in text.splitlines() if line.startswith(f"  forward {at} ")]
    assert "MatMul" in line
    assert "at most 7 of 8 groups of 32 live  a mask is proved for its operand" in line
    assert line.split()[-2:] == [str(check["held"]), str(check["broken"])]


def test_the_workspace_option_takes_another_layout_and_says_so(capsys, compiled) -> None:
    found = {}
    for name, options in (("free", ()), ("tight", ("--layout-workspace", str(BUDGET)))):
        bundle = compiled(name, pruned, *options)
        plan = parse_plan((bundle / "sections" / "plan").read_bytes())
        document, text = explained(capsys, bundle)
        (row,) = document["layouts"]
        prices = {price["layout"]: price for price in row["prices"]}
        found[name] = row["chosen"], {weight.kind for weight in plan.weights}, prices, text
    chosen, kinds, prices, text = found["free"]
    assert (chosen, prices["csr"]["refused"]) == ("csr", "")
    assert Kind.W4_CSR in kinds
    assert prices["csr"]["workspace_bytes"] == 16 * HIDDEN
    assert "% not zero: csr" in text
    chosen, kinds, prices, text = found["tight"]
    assert chosen not in ("csr", "coo")
    assert not {Kind.W4_CSR, Kind.W4_COO} & kinds
    reason = f"needs {16 * HIDDEN} bytes of workspace, the budget is {BUDGET}"
    assert prices["csr"]["refused"] == prices["coo"]["refused"] == reason
    (line,) = [line for line in text.splitlines() if line.startswith("  csr ")]
    assert line.endswith(f"4.0 KiB  {reason}")
