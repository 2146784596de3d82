"""`manage.py test`: the everyday tier of the suite, or everything with `--full`."""

import subprocess
import sys
from argparse import ArgumentParser

from django.core.management.base import BaseCommand

from dashboards.conf.env import ROOT


class Command(BaseCommand):
    """Run the tests with two workers and say at the end what this machine could not run."""

    help = "Run the test suite. The everyday tier takes minutes; --full adds the long campaigns."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options; anything after `--` goes to pytest."""
        parser.add_argument("--full", action="store_true", help="also run the long campaigns")
        parser.add_argument("--workers", type=int, default=2, help="test processes (default 2)")
        parser.add_argument(
            "--only-setup", action="store_true", help="build the environment, run nothing"
        )
        parser.add_argument("paths", nargs="*", help="files or folders, all of tests/ by default")

    def handle(self, *args: object, **options: object) -> None:
        """Start pytest and leave with its exit code."""
        if options["only_setup"]:
            return
        command = [sys.executable, "-m", "pytest", "-p", "tests.plugins.engines", "-q"]
        command.append("--ds=tests.settings")  # this process has the settings of the platform
        workers = int(str(options["workers"]))
        if workers > 1:
            command += ["-n", str(workers), "--dist", "loadgroup"]
        if options["full"]:
            command.append("--full")
        paths = options["paths"]
        command += [str(path) for path in paths] if isinstance(paths, list) else []
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)  # noqa: S603
