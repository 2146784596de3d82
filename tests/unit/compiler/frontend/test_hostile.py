"""Hostile submissions end in a typed error, or compile; nothing crashes, hangs or escapes."""

from collections import Counter
from pathlib import Path

import pytest

from compiler.driver.vet import Verdict, vet_submissions
from compiler.frontend.limits import ImportLimits
from tests.factories.hostile import ATTACKS, SEEDS, Mutant, mutants

LIMITS = ImportLimits(max_seconds=20.0, max_memory_bytes=3 << 30)
USER = "build.user."
EXPECTED = {
    "cycle": "build.user.malformed_model",
    "external_data": "build.user.malformed_model",
    "truncate": "build.user.malformed_model",
    "twice": "build.user.malformed_model",
    "huge_constant": "build.user.limit",
    "endless_function": "build.user.limit",
    "nested_graphs": "",
}


def verdicts(corpus: list[Mutant], folder: Path) -> list[Verdict]:
    """Import the whole corpus in as few processes as it survives."""
    directories = [mutant.write(folder / str(at) / "s") for at, mutant in enumerate(corpus)]
    return vet_submissions(directories, LIMITS)


def check(corpus: list[Mutant], folder: Path) -> Counter[tuple[str, str]]:
    found = verdicts(corpus, folder)
    assert len(found) == len(corpus)
    for mutant, verdict in zip(corpus, found, strict=True):
        assert not verdict.code or verdict.code.startswith(USER), (mutant, verdict)
        assert bool(verdict.message) is bool(verdict.code), (mutant, verdict)
        assert "end the process" not in verdict.message, (mutant, verdict)
        assert str(folder) not in verdict.message, (mutant, verdict)
    return Counter((m.attack, v.code) for m, v in zip(corpus, found, strict=True))


def test_only_typed_errors_leave_the_compiler(tmp_path: Path) -> None:
    corpus = mutants(5)
    assert len(corpus) >= 300
    assert len(SEEDS) >= 5
    found = check(corpus, tmp_path)
    assert {attack for attack, _ in found} == set(ATTACKS)
    assert {attack: found[attack, code] > 0 for attack, code in EXPECTED.items()} == dict.fromkeys(
        EXPECTED, True
    )
    assert found["external_data", "build.user.malformed_model"] == 5 * len(SEEDS)
    assert found["cycle", "build.user.malformed_model"] == 5 * len(SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_only_typed_errors_leave_the_compiler_at_length(
    tmp_path: Path, part: int, record_property
) -> None:
    found = check(mutants(25, first_seed=100 + 25 * part), tmp_path)
    record_property("submissions", found.total())
    for code in sorted({code for _, code in found}):
        count = sum(n for (_, other), n in found.items() if other == code)
        record_property(code or "imported", count)
