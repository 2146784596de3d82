"""Every command that the runbook about signing shows exists, with the options that it shows."""

import re
import shlex
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class

RUNBOOK = Path(__file__).resolve().parents[3] / "docs" / "runbooks" / "signing.md"
SHOWN = [
    line.strip()
    for line in RUNBOOK.read_text(encoding="utf-8").splitlines()
    if line.startswith("    python3 manage.py ")
]


def test_it_shows_commands() -> None:
    assert len(SHOWN) >= 15


@pytest.mark.parametrize("line", SHOWN)
def test_it_shows_what_there_is(line: str) -> None:
    _, _, name, *arguments = [word for word in shlex.split(line, comments=True) if word != "..."]
    application = get_commands()[name]
    assert isinstance(application, str)
    load_command_class(application, name).create_parser("manage.py", name).parse_args(arguments)


def test_it_names_only_commands_that_there_are() -> None:
    named = set(re.findall(r"\b(?:keys|release)_[a-z]+\b", RUNBOOK.read_text(encoding="utf-8")))
    assert named <= {*get_commands(), "release_manager"}
