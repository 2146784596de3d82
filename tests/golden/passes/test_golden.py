"""Each pass on a small model: the text before and after it, reviewed as a file.

The input of a pass is what the passes before it leave; it is parsed from the file's first half, so
the text alone carries everything. Rewrite the files with `python -m tests.golden.passes.rewrite`.
"""

import importlib
import pkgutil
from pathlib import Path

import pytest

import compiler.passes
from compiler.dialects.text import parse_module, print_module
from compiler.passes.pipeline import OPTIONAL, STAGES
from tests.golden.passes.cases import CASES, SEPARATOR, golden_path, golden_text, prepared

NAMES_ITS_INPUT = {
    *("compose", "select-kernels", "propagate-masks"),
    *("inject-masks", "remove-columns"),
}
"""A second run has nothing to find, or refuses that what it is told of has changed."""
ALL_PASSES = [current for stage in STAGES.values() for current in stage]


@pytest.mark.parametrize("name", sorted(CASES))
def test_it_rewrites_as_recorded(tmp_path: Path, name: str) -> None:
    assert golden_text(name, tmp_path) == golden_path(name).read_text()


@pytest.mark.parametrize("name", sorted(CASES))
def test_it_needs_nothing_but_the_text_and_the_constants(tmp_path: Path, name: str) -> None:
    before, after = golden_path(name).read_text().split(SEPARATOR)
    current, _, ctx = prepared(name, tmp_path)
    module = parse_module(before)
    current.run(module, ctx)
    module.verify()
    assert print_module(module) == after


def test_every_pass_has_a_golden_file() -> None:
    assert {current.name for current in ALL_PASSES} == set(CASES)
    assert {path.stem for path in golden_path("x").parent.glob("*.irtest")} == set(CASES)


def test_every_pass_module_is_listed() -> None:
    listed = {type(current).__module__ for current in (*ALL_PASSES, *OPTIONAL)}
    defined = set()
    for found in pkgutil.iter_modules(compiler.passes.__path__, "compiler.passes."):
        module = importlib.import_module(found.name)
        for value in vars(module).values():
            is_pass = isinstance(value, type) and hasattr(value, "run") and hasattr(value, "name")
            if is_pass and value.__module__ == found.name:
                defined.add(found.name)
    assert defined == listed


def test_passes_leave_no_work_for_a_second_run(tmp_path: Path) -> None:
    for name in sorted(set(CASES) - NAMES_ITS_INPUT):
        current, module, ctx = prepared(name, tmp_path / name)
        current.run(module, ctx)
        settled = print_module(module)
        current.run(module, ctx)
        assert print_module(module) == settled, name
