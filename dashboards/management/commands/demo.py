"""`manage.py demo`: the main job with real parts, on the embedded defaults."""

import signal
import sys
import time
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from django.core.management.base import BaseCommand
from rich.console import Console

from dashboards.conf.env import ROOT
from dashboards.demo import devices, platform, story
from dashboards.demo.client import ApiClient, wait_for
from dashboards.demo.errors import DemoError
from dashboards.demo.outcome import Outcome
from dashboards.demo.processes import ProcessGroup, require_free_port

VERSIONS = ("v1", "v2", "v3-bad")
PROBATION_S = 3.0
START_TIMEOUT_S = 60.0


class Command(BaseCommand):
    """Play the main job and print what happened."""

    help = (
        "Run the main job: submit, compile, roll out, update by delta, stop a bad version. "
        "Leaves the web UI running unless --once is given."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--once", action="store_true", help="exit when the job is done")
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write the summary for machines"
        )
        parser.add_argument("--port", type=int, default=8000, help="port of the web UI (8000)")
        parser.add_argument(
            "--state-dir",
            type=Path,
            default=ROOT / "var" / "demo",
            help="the demo's own folder, emptied at the start; var/demo by default",
        )

    def handle(self, *args: object, **options: object) -> None:
        """Run; exit status 0 if every check came out right."""
        console, outcome = Console(), Outcome()
        port, once = int(str(options["port"])), bool(options["once"])
        target = options["json"]
        signal.signal(signal.SIGTERM, _interrupt)
        started = time.monotonic()
        try:
            root = Path(str(options["state_dir"])).resolve()
            self._run(console, outcome, root, port, once=once, target=target, started=started)
        except DemoError as error:
            console.print(f"[red]error:[/] {error}", highlight=False)
            if error.hint:
                console.print(f"[yellow]hint:[/] {error.hint}", highlight=False)
            raise SystemExit(1) from error
        except KeyboardInterrupt:
            console.print("stopped")
        raise SystemExit(0 if outcome.ok else 1)

    def _run(
        self,
        console: Console,
        outcome: Outcome,
        root: Path,
        port: int,
        *,
        once: bool,
        target: object,
        started: float,
    ) -> None:
        devices.require_x86()
        require_free_port(platform.HOST, port)
        with (
            platform.fresh_state(root) as state,
            ProcessGroup(
                root / "logs", ROOT, platform.platform_environment(state, PROBATION_S)
            ) as group,
            ThreadPoolExecutor(len(VERSIONS)) as pool,
        ):
            written = [
                pool.submit(_materialise, group, root / "submissions" / version, version)
                for version in VERSIONS
            ]
            access, base_url = _start_platform(console, group, state, port)
            submissions = {
                version: done.result() for version, done in zip(VERSIONS, written, strict=True)
            }
            console.print("[green]✓[/] three versions of EdgeCard, as CI has them")
            with (
                ApiClient(base_url, access.ci_token) as ci,
                ApiClient(base_url, access.manager_token) as desk,
            ):
                ci.post("/models", {"name": story.MODEL, "title": story.MODEL_TITLE})
                count = _start_devices(console, group, base_url, root, submissions["v1"])
                play(story.Story(ci, desk, group, submissions, count, outcome, console))
            outcome.figures["wall_s"] = round(time.monotonic() - started, 1)
            outcome.row("the whole job", "wall time", f"{outcome.figures['wall_s']} s")
            outcome.print(console)
            if isinstance(target, Path):
                outcome.write_json(target)
            if not once:
                _leave_running(console, group, base_url, access, root)


def play(the: story.Story) -> None:
    """Run the steps of the main job in order."""
    story.wait_for_devices(the)
    story.submit_and_build(the, "v1", None)
    story.first_install(the, "v1")
    story.submit_and_build(the, "v2", "v1")
    story.staged_update(the, "v2")
    story.submit_and_build(the, "v3-bad", "v2")
    story.bad_update(the, "v3-bad", "v2")
    story.accuracy(the, VERSIONS)


def _start_platform(
    console: Console, group: ProcessGroup, state: Path, port: int
) -> tuple[platform.Access, str]:
    with console.status("database, demo keys, users ..."):
        access = platform.set_up(group)
    console.print("[green]✓[/] database, demo keys and users")
    with console.status("web and worker ..."):
        base_url = platform.start_web(group, port)
        platform.start_worker(group, state)
        wait_for(
            lambda: platform.is_ready(base_url),
            what="the web process",
            timeout_s=START_TIMEOUT_S,
            watch=group.require_alive,
        )
    console.print(f"[green]✓[/] web UI on [bold]{base_url}[/], one worker")
    _print_login(console, access)
    return access, base_url


def _materialise(group: ProcessGroup, folder: Path, version: str) -> Path:
    group.run([sys.executable, "-m", "examples.edgecard.materialise", version, folder])
    return folder


def _start_devices(
    console: Console, group: ProcessGroup, base_url: str, root: Path, submission: Path
) -> int:
    levels = devices.levels(devices.host_target(group))
    total = len(levels) * (1 + devices.FARM_PER_LEVEL)
    settings = devices.agent_settings(
        server_url=base_url,
        claim=platform.claim_token(group, total),
        model=story.MODEL,
        evaluation=submission / "evaluation.json",
        probation_s=PROBATION_S,
    )
    folder = root / "devices"
    for number, level in enumerate(levels, 1):
        name = f"agent-{number}-{level.target}"
        devices.start_agent(group, name=name, level=level, settings=settings, folder=folder)
    devices.start_farm(
        group, levels=levels, per_level=devices.FARM_PER_LEVEL, settings=settings, folder=folder
    )
    targets = ", ".join(level.target for level in levels)
    console.print(f"[green]✓[/] {total} agents in 4 processes ({targets})")
    return total


def _leave_running(
    console: Console, group: ProcessGroup, base_url: str, access: platform.Access, root: Path
) -> None:
    console.print(f"\nThe web UI runs on [bold]{base_url}[/]  (Ctrl-C ends everything)")
    _print_login(console, access)
    where = root.relative_to(ROOT) if root.is_relative_to(ROOT) else root
    console.print(f"  logs: {where}/logs", highlight=False)
    console.print(
        f"  commands on this platform: SPARSEFLEET_STATE_DIR={where}/platform "
        "python3 manage.py token_create --name me --role developer",
        highlight=False,
        soft_wrap=True,
    )
    while True:
        group.require_alive()
        time.sleep(1.0)


def _print_login(console: Console, access: platform.Access) -> None:
    console.print(f"  login: release-manager / {access.manager_password}", highlight=False)
    console.print(f"  login: admin / {access.admin_password}", highlight=False)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
