"""Every command on a real bundle: what it prints for people and programs, and on bad input."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from compiler.driver import cli
from compiler.driver.native_check import runs_here
from compiler.frontend.pipeline_json import read_pipeline
from compiler.hardware.targets import find_target
from compiler.passes.pipeline_spec import FAMILY_VISION
from tests.factories.families import LLAVA_PHI
from tests.factories.family_directories import write_transformers_js
from tests.factories.submissions import WIDTH, linear_submission

TARGET = "x86-64-v1"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Two versions of a small model, compiled: `one` and `two`, and their submissions."""
    root = tmp_path_factory.mktemp("commands")
    for name, seed, layers in (("one", 1, 1), ("two", 1, 2)):
        linear_submission(root / f"{name}-submission", seed=seed, layers=layers)
        compile_it(root, name)
    return root


def compile_it(root: Path, name: str) -> int:
    return cli.main(
        [
            *("compile", str(root / f"{name}-submission"), "--target", TARGET),
            *("--out", str(root / name), "--cache", str(root / "cache"), "--release", name),
        ]
    )


def ask(capsys, *arguments: object) -> dict:
    """Run a command with `--json` and return its document."""
    capsys.readouterr()
    assert cli.main([*map(str, arguments), "--json"]) == cli.OK
    return json.loads(capsys.readouterr().out)


def fails(capsys, *arguments: object) -> tuple[int, dict]:
    """Run a command with `--json` that must fail; return the status and the error."""
    capsys.readouterr()
    status = cli.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)["error"]


def broken(world: Path, tmp_path: Path, how) -> Path:
    folder = shutil.copytree(world / "one", tmp_path / "broken")
    how(folder)
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped bit": lambda folder: flip(folder / "sections" / "weights.shared"),
    "truncated section": lambda folder: (folder / "sections" / "plan").write_bytes(b"SF"),
    "missing section": lambda folder: (folder / "sections" / "kernels").unlink(),
    "truncated manifest": lambda folder: (folder / "manifest.json").write_bytes(b'{"model"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["explain", "inspect", "diff", "simulate"])
def test_it_refuses_a_damaged_bundle(capsys, world, tmp_path, command, damage) -> None:
    folder = broken(world, tmp_path, DAMAGE[damage])
    more = {"diff": [world / "two"], "simulate": ["--run", "forward=random"]}.get(command, [])
    status, error = fails(capsys, command, folder, *more)
    assert status == cli.USER_FAULT
    assert error["code"].startswith("contract")
    assert error["message"]


def test_it_compiles_again_from_the_cache_and_says_so(capsys, world) -> None:
    document = ask(
        *(capsys, "compile", world / "one-submission", "--target", TARGET, "--release", "one"),
        *("--out", world / "one", "--cache", world / "cache"),
    )
    cached = {row["name"]: row["cached"] for row in document["stages"]}
    assert all(cached[name] for name in ("import", "raise", "quantise", "plan", "kernels"))
    assert cached["selftest"]
    info = ask(capsys, "compile", "--cache", world / "cache", "--cache-info")
    assert {"lowered", "weight", "portable", "kernels", "vectors"} <= info["stages"].keys()
    assert info["bytes"] == sum(stage["bytes"] for stage in info["stages"].values())


def test_it_keeps_the_cache_below_its_limit(capsys, world, tmp_path) -> None:
    arguments = ["compile", world / "one-submission", "--target", TARGET, "--out", tmp_path / "o"]
    ask(capsys, *arguments, "--cache", tmp_path / "cache", "--cache-limit", "40K")
    info = ask(capsys, "compile", "--cache", tmp_path / "cache", "--cache-info")
    zig = tmp_path / "cache" / "toolchain" / "zig"
    foreign = sum(path.stat().st_size for path in zig.rglob("*") if path.is_file())
    assert info["bytes"] - foreign <= 40 * 1024


def test_it_names_the_node_and_the_operator(capsys, world, tmp_path) -> None:
    submission = linear_submission(tmp_path / "s", op="BitwiseAnd")
    status, error = fails(
        capsys, "compile", submission, "--target", TARGET, "--out", tmp_path / "o"
    )
    assert status == cli.USER_FAULT
    assert "BitwiseAnd" in error["message"]
    assert "project_0" in error["message"]
    assert error["hint"]


def test_it_shows_the_tables_of_a_bundle(capsys, world) -> None:
    found = ask(
        *(capsys, "inspect", world / "one", "sections", "plan", "weights", "buffers", "memory"),
        *("selftest", "policy"),
    )
    (row,) = found["policy"]["classes"]
    assert (row["kind"], row["calls"]) == ("LINEAR", {"forward": 1})
    assert row["used"] == [False] * 6 + [True]
    assert {row["section"] for row in found["sections"]["sections"]} >= {"plan", "kernels"}
    (call,) = found["plan"]["forward"]
    assert call["op"] == "LINEAR"
    assert [row["shape"] for row in found["weights"]] == [f"{WIDTH}x{WIDTH}"]
    assert {row["alive"] for row in found["buffers"]} == {"forward 0-0", "forward 0-1"}
    placed = found["memory"]["arena"]
    assert max(row["offset"] + row["bytes"] for row in placed) <= found["memory"]["arena_bytes"]
    assert len(found["selftest"]["vectors"]) >= 16
    assert cli.main(["inspect", str(world / "one"), "plan", "memory", "policy"]) == cli.OK
    text = capsys.readouterr().out
    assert "linear  <=32K         <=1   forward 1" in text
    assert f"b1[Tx{WIDTH}] = LINEAR(b0" in text
    assert "|####" in text


def test_it_prints_the_ir_of_a_stage(capsys, world) -> None:
    document = ask(capsys, "inspect", world / "one", "--ir", "raised")
    assert document["ir"].startswith("builtin.module")
    assert "sp.linear" in document["ir"]
    assert "sp.onnx" in ask(capsys, "inspect", world / "one", "--ir", "imported")["ir"]
    status, error = fails(capsys, "inspect", world / "one", "--ir", "cooked")
    assert status == cli.BAD_ARGUMENTS
    assert "raised" in error["hint"]
    status, error = fails(capsys, "inspect", world / "one", "soup")
    assert status == cli.BAD_ARGUMENTS
    assert "memory" in error["hint"]


def test_it_explains_a_bundle_in_text_json_and_a_picture(capsys, world, tmp_path) -> None:
    drawing = tmp_path / "pictures" / "two.svg"
    found = ask(capsys, "explain", world / "two", "--svg", drawing)
    program = found["explained"]["programs"]["forward"]
    assert [call["operation"] for call in program["calls"]] == ["LINEAR", "LINEAR"]
    assert program["flops"] == sum(call["flops"] for call in program["calls"])
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    assert found["sparsity"].keys() == {"forward"}
    assert cli.main(["explain", str(world / "two")]) == cli.OK
    text = capsys.readouterr().out
    assert "program forward, 1 tokens behind 0 rows" in text
    assert f"shares of time: {found['explained']['shares']}" in text
    assert "memory: arena" in text
    assert "MatMul project_0" in text
    assert "nodes of the files: 2 in calls, 0 folded when compiling, 0 dead" in text
    (tmp_path / "file").write_text("")
    status, _ = fails(capsys, "explain", world / "two", "--svg", tmp_path / "file" / "o.svg")
    assert status == cli.BAD_ARGUMENTS


def test_it_says_where_a_node_went(capsys, world) -> None:
    assert cli.main(["explain", str(world / "two"), "--node", "project_1"]) == cli.OK
    assert capsys.readouterr().out == "model MatMul project_1: forward call 1 (linear)\n"
    status, error = fails(capsys, "explain", world / "two", "--node", "nobody")
    assert status == cli.BAD_ARGUMENTS
    assert "'nobody'" in error["message"]
    assert "ONNX file" in error["hint"]


def test_it_measures_again_when_asked(capsys, world) -> None:
    if not runs_here(find_target(TARGET)):
        pytest.skip("this machine cannot run the target")
    found = ask(capsys, "explain", world / "one", "--measure")
    assert found["explained"]["nodes"][0][:3] == ["model", "project_0", "MatMul"]
    assert found["explained"]["programs"]["forward"]["calls"][0]["nodes"] == [0]
    assert found["explained"]["shares"] == "measured"
    assert found["explained"]["programs"]["forward"]["measured_us"] > 0


def test_it_imports_an_onnx_file_and_compiles_what_it_wrote(capsys, world, tmp_path) -> None:
    source = world / "one-submission" / "m.onnx"
    found = ask(capsys, "import", source, "--out", tmp_path / "s", "--dim", "T=4")
    (component,) = found["components"].values()
    assert component["inputs"].keys() == {"x"}
    assert component["outputs"].keys() == {"y"}
    assert component["shapes"]["x"][0] == 4
    done = ask(
        *(capsys, "compile", tmp_path / "s", "--target", TARGET, "--out", tmp_path / "o"),
        *("--cache", world / "cache"),
    )
    assert done["sections"] >= 5


def test_it_imports_a_directory_of_a_family(capsys, tmp_path) -> None:
    write_transformers_js(tmp_path / "phi", LLAVA_PHI)
    found = ask(
        *(capsys, "import", tmp_path / "phi", "--out", tmp_path / "s"),
        *("--max-context", "32", "--max-step-tokens", "8"),
    )
    assert found["family"] == FAMILY_VISION
    assert found["components"].keys() == {"vision", "embed", "decoder"}
    assert read_pipeline(tmp_path / "s").max_context == 32


def test_it_refuses_options_of_the_other_kind_of_source(capsys, world, tmp_path) -> None:
    source = world / "one-submission" / "m.onnx"
    for where, option in (
        (source, "--precision=q4"),
        (source, "--max-context=8"),
        (tmp_path, "--dim=T=4"),
        (tmp_path, "--quantise=w4"),
        (tmp_path, "--max-step-tokens=0"),
    ):
        status, error = fails(capsys, "import", where, "--out", tmp_path / "s", option)
        assert status == cli.BAD_ARGUMENTS
        assert option.split("=")[0] in error["message"]


def test_it_says_what_an_import_lacks(capsys, world, tmp_path) -> None:
    source = world / "one-submission" / "m.onnx"
    for option in ("--dim=T", "--dim=T=four", "--dim==4", "--constant=x=much"):
        status, error = fails(capsys, "import", source, "--out", tmp_path / "s", option)
        assert status == cli.BAD_ARGUMENTS
        assert "for example" in error["hint"]
    status, error = fails(capsys, "import", tmp_path / "none.onnx", "--out", tmp_path / "s")
    assert status == cli.BAD_ARGUMENTS
    assert "does not exist" in error["message"]
    status, error = fails(
        capsys, "import", source, "--out", tmp_path / "s", "--dim", "T=4", "--dim", "U=3"
    )
    assert status == cli.USER_FAULT
    assert "U" in error["message"]


def test_it_names_the_axis_that_was_meant(capsys, world, tmp_path) -> None:
    source = world / "one-submission" / "m.onnx"
    for option, name in (("--dim", "Tt"), ("--dim", "x:9"), ("--constant", "xx")):
        status, error = fails(
            *(capsys, "import", source, "--out", tmp_path / "s", option, f"{name}=4")
        )
        what, near, known = {
            "Tt": ("axis", "T", "T, x:0, x:1"),
            "x:9": ("axis", "x:1", "T, x:0, x:1"),
            "xx": ("input", "x", "x"),
        }[name]
        assert status == cli.USER_FAULT
        assert error["message"] == (
            f"the file has no {what} called {name!r}; did you mean {near!r}?"
        )
        assert error["hint"] == f"it has: {known}"
    status, error = fails(capsys, "import", source, "--out", tmp_path / "s", "--dim", "bacth=4")
    assert "mean" not in error["message"]
    assert not (tmp_path / "s").exists()


def test_it_says_that_a_model_without_a_cache_keeps_no_int8(capsys, world, tmp_path) -> None:
    arguments = ("compile", world / "one-submission", "--target", TARGET, "--out", tmp_path / "o")
    cache = ("--cache", world / "cache")
    (text,) = ask(capsys, *arguments, *cache, "--kv", "int8")["caveats"][:1]
    assert text == "keys and values as int8 change nothing: this model has no key/value cache"
    assert not any("int8" in text for text in ask(capsys, *arguments, *cache)["caveats"])
    assert cli.main([*map(str, arguments), *map(str, cache), "--kv", "int8"]) == cli.OK
    assert f"caveat: {text}" in capsys.readouterr().out.splitlines()


def test_it_scores_only_bundles_that_answer_questions(capsys, world) -> None:
    status, error = fails(capsys, "evaluate", world / "one", world / "one-submission")
    assert status == cli.USER_FAULT
    assert error["message"].endswith("forward takes tensor and gives tensor")
    assert "--run forward=FILE.npz" in error["hint"]
    assert cli.main(["evaluate", str(world / "one"), str(world)]) == cli.USER_FAULT
    assert "questions\n" not in capsys.readouterr().err.split("error:")[0]


@pytest.mark.parametrize("cards", ["0", "-3", "many"])
@pytest.mark.parametrize("command", [("evaluate", "b", "c"), ("prune", "s", "--target", TARGET)])
def test_it_refuses_no_cards(capsys, command, cards) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--cards", cards])
    assert ended.value.code == cli.BAD_ARGUMENTS
    assert f"{cards!r} is not a number from 1 on" in capsys.readouterr().err


def test_it_compares_two_bundles(capsys, world) -> None:
    same = ask(capsys, "diff", world / "one", world / "one")
    assert same["sections"] == same["plan"] == []
    assert same["manifest"] == {}
    found = ask(capsys, "diff", world / "one", world / "two")
    assert found["manifest"] == {"version": ["one", "two"]}
    changed = {row["section"]: row["change"] for row in found["sections"]}
    assert changed["plan"] == changed["weights.shared"] == "changed"
    assert found["plan"][0] == "program forward:"
    assert sum(line.startswith("  +") for line in found["plan"]) >= 1
    assert 0 < found["update"]["delta_bytes"] < found["update"]["full_bytes"] * 1.1
    assert cli.main(["diff", str(world / "one"), str(world / "two")]) == cli.OK
    text = capsys.readouterr().out
    assert "predicted delta: " in text
    assert text.splitlines()[1].split() == ["change", "section", "old", "new"]


def test_it_simulates_a_bundle_and_a_submission_alike(capsys, world, tmp_path) -> None:
    rows = np.random.default_rng(3).standard_normal((5, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "in.npz", tensor=rows)
    outputs = []
    for model in ("one", "one-submission"):
        out = tmp_path / f"{model}.npz"
        document = ask(
            *(capsys, "simulate", world / model, "--run", f"forward={tmp_path / 'in.npz'}"),
            *("--compare", "native", "--out", out, "--cache", world / "cache"),
        )
        (row,) = document["outputs"]
        assert row["equal_bits"] is True
        assert row["shape"] == [5, WIDTH]
        outputs.append(np.load(out)["0.forward.tensor"])
    assert outputs[0].tobytes() == outputs[1].tobytes()
    exact = tmp_path / "exact.npz"
    arguments = ["simulate", world / "one-submission", "--run", f"forward={tmp_path / 'in.npz'}"]
    document = ask(capsys, *arguments, "--mode", "f64", "--out", exact, "--compare", "native")
    found = np.load(exact)["0.forward.tensor"]
    assert found.dtype == np.float64
    assert 0 < document["outputs"][0]["relative_error"] < 0.5  # four bits a weight


def test_it_reads_inputs_as_json(capsys, world, tmp_path) -> None:
    (tmp_path / "in.json").write_text(json.dumps({"tensor": [[0.0] * WIDTH] * 2}))
    document = ask(
        *(capsys, "simulate", world / "one", "--run", f"forward={tmp_path / 'in.json'}"),
        *("--run", "forward=random"),
    )
    zeros, other = document["outputs"]
    assert [row["shape"] for row in (zeros, other)] == [[2, WIDTH], [1, WIDTH]]
    assert (zeros["first"], zeros["min"], zeros["max"]) == ([0.0] * 6, 0.0, 0.0)
    assert other["min"] < 0 < other["max"]
    assert other["not_finite"] == 0


def test_it_prints_values_of_outputs(capsys, world, tmp_path) -> None:
    (tmp_path / "in.json").write_text(json.dumps({"tensor": [[0.0] * WIDTH]}))
    arguments = ["simulate", world / "one", "--run", f"forward={tmp_path / 'in.json'}"]
    assert cli.main([str(item) for item in arguments]) == cli.OK
    assert f"[1, {WIDTH}] = 0 0 0 0 0 0 ..., from 0 to 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ({"tensor": [[1.0, 2.0]]}, cli.USER_FAULT, f"expected f32 of T x {WIDTH}"),
        ({"tensor": []}, cli.USER_FAULT, "expected f32"),
        ({"image": [[1.0] * WIDTH]}, cli.USER_FAULT, "program forward takes ['tensor']"),
        ({"tensor": [[1.0], [1.0, 2.0]]}, cli.USER_FAULT, "no .npz or .json of arrays"),
        ({"tensor": [[1.0] * WIDTH] * 9}, cli.USER_FAULT, "9 tokens, at most 8"),
        ("not json", cli.USER_FAULT, "JSON"),
        (None, cli.USER_FAULT, "cannot be read"),
    ],
)
def test_it_refuses_inputs_that_do_not_fit(
    capsys, world, tmp_path, content, status, message
) -> None:
    path = tmp_path / "in.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    found, error = fails(capsys, "simulate", world / "one", "--run", f"forward={path}")
    assert found == status
    assert message in error["message"]


def test_it_refuses_runs_of_nothing(capsys, world, tmp_path) -> None:
    for text in ("backward=random", "forward", "forward="):
        status, error = fails(capsys, "simulate", world / "one", "--run", text)
        assert status == cli.BAD_ARGUMENTS
        assert "forward" in error["hint"]
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 broken")
    status, _ = fails(
        capsys, "simulate", world / "one", "--run", f"forward={tmp_path / 'broken.npz'}"
    )
    assert status == cli.USER_FAULT
    (tmp_path / "file").write_text("")
    status, _ = fails(
        *(capsys, "simulate", world / "one", "--run", "forward=random"),
        *("--out", tmp_path / "file" / "o.npz"),
    )
    assert status == cli.BAD_ARGUMENTS
