"""Every input that is kept ends as it may, every day."""

import pytest

from tests.fuzz.targets import CORPUS, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_ends_as_it_may(name: str) -> None:
    target = TARGETS[name]
    examples = list(target.examples())
    assert examples
    for data in examples:
        target.outcome(data)
        for cut in range(0, len(data), max(1, len(data) // 16)):
            target.outcome(data[:cut])
    for path in sorted((CORPUS / name).glob("*")):
        target.outcome(path.read_bytes())


@pytest.mark.parametrize(
    "name",
    [
        *("bands", "bsdiff4", "condition", "degrade", "delta", "delta_table", "expert_groups"),
        *("manifest", "onnx_outline", "pipeline", "plan", "policy", "poll", "router_stats"),
        *("schedule", "selftest", "slots", "floors", "journal", "fingerprint", "report"),
        *("steering", "telemetry", "twin"),
    ],
)
def test_an_example_is_read(name: str) -> None:
    target = TARGETS[name]
    assert "read" in {target.outcome(data) for data in target.examples()}
