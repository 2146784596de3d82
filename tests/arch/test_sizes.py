"""The caps of the house style: 500 lines a file, 50 a function; no module without a name."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("compiler", "builds", "fleet", "dashboards", "device_agent")
BANNED_NAMES = {"utils", "helpers", "misc", "manager", "util", "helper"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50


def sources() -> list[Path]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in files if "migrations" not in path.parts]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_it_keeps_files_and_functions_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    assert path.stem not in BANNED_NAMES
    long = [
        f"{node.name}:{node.lineno}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long
