"""A worker killed with -9 while its compiler runs: another run makes the same sections."""

from pathlib import Path

import pytest

from tests.integration.platform import FAKE_CHILD, Platform, kill_group, submit, wait_until

RUN_ONE = """
from builds.compile_runner.run import build_run_one
build_run_one({job})
print("true")
"""
AFTERWARDS = """
import time
from builds.compile_runner.run import build_run_one
from builds.models import BuildJob, BundleSection
from builds.services.leases import leases_expire
job = BuildJob.objects.get(pk={job})
story = [job.state]
while not leases_expire():
    time.sleep(0.2)
for pk in ({job}, {twin}):
    build_run_one(pk)
job.refresh_from_db()
story += list(job.transitions.values_list("event", flat=True)) + [job.state, job.attempt]
sections = [
    sorted(BundleSection.objects.filter(bundle__job=pk).values_list("component", "sha256"))
    for pk in ({job}, {twin})
]
print(json.dumps([story, sections]))
"""


@pytest.fixture
def platform(tmp_path: Path) -> Platform:
    return Platform(tmp_path, compile_command=FAKE_CHILD, build_lease_s="3").install()


def test_it_finishes_the_work_of_a_killed_worker(platform: Platform) -> None:
    job, twin = submit(
        platform, (b"hang", "interrupted", "x86-64-v3"), (b"hang", "left-alone", "x86-64-v3")
    )
    flag = platform.folder / "cache" / "hanging"
    with platform.running(platform.script(RUN_ONE.format(job=job)), "worker") as worker:
        wait_until(flag.exists, 240, "the compiler runs")
        child = int(flag.read_text())
        kill_group(worker)
    wait_until(lambda: is_gone(child), 60, "the compiler dies with its worker")
    story, sections = platform.ask(AFTERWARDS.format(job=job, twin=twin))
    assert story[0] == "compiling"
    assert story[1:4] == ["lease", "compile", "lease_expired"]
    assert story[4:] == ["lease", "compile", "verify", "sign", "publish", "ready", 2]
    assert sections[0] == sections[1] != []
    assert list((platform.folder / "work").iterdir()) == []


def is_gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"  # dead, and nobody has asked yet
