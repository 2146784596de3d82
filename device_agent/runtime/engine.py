"""The engine port: test a bundle, start a bundle. The real one runs native code."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from compiler.contract.errors import ContractError
from compiler.contract.native_library import MAX_THREADS
from compiler.contract.selftest import parse_selftest
from device_agent.errors import BundleError, SelfTestFailedError
from device_agent.runtime.affinity import AUTO, cpus_for
from device_agent.runtime.answers import Answerer, BundleAnswerer
from device_agent.runtime.bundle import LoadedBundle, load_bundle
from device_agent.runtime.threads import tune_threads
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer

_PROCESS: Final = "device_agent.runtime.self_test_process"
_PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
MAX_OUTPUT_SHOWN: Final = 300


class Engine(Protocol):
    """Runs bundles."""

    def self_test(self, pointer: Pointer) -> None:
        """Check that the bundle computes here what it computed at its birth.

        Raises:
            SelfTestFailedError: It does not, or it crashed, hung, or does not load.
        """

    def start(self, pointer: Pointer) -> Answerer:
        """Load the bundle.

        Raises:
            BundleError: It is incomplete, damaged, or does not load.
        """


@dataclass(frozen=True, slots=True)
class NativeEngine:
    """Runs the native code of a bundle; the self-test in a child process.

    Attributes:
        store: Holds the sections.
        state_dir: The folder of `store`, for the child.
        self_test_timeout_s: The child is killed after this, seconds.
        answer_timeout_s: Limit of one answer, seconds.
        threads: Threads of one answer; 0 = as many as help, at most one per core.
        cpus: Where lent threads run: `auto`, `off` or a list of cores.
    """

    store: ObjectStore
    state_dir: Path
    self_test_timeout_s: float
    answer_timeout_s: float
    threads: int = 0
    cpus: str = AUTO

    def self_test(self, pointer: Pointer) -> None:
        """Run the self-test in a child; see `Engine`."""
        command = [
            sys.executable,
            "-m",
            _PROCESS,
            str(self.state_dir.resolve()),
            pointer.manifest_sha256,
            str(pointer.size_bytes),
        ]
        try:
            done = subprocess.run(  # noqa: S603 -- our own module
                command,
                cwd=_PACKAGE_ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.self_test_timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SelfTestFailedError(
                f"the self-test was not finished after {self.self_test_timeout_s:g} s"
            ) from None
        except OSError as error:
            raise SelfTestFailedError(f"the self-test cannot be started: {error}") from error
        _require_passed(done)

    def start(self, pointer: Pointer) -> Answerer:
        """Load the bundle; see `Engine`."""
        bundle = load_bundle(self.store, pointer)
        try:
            facts = self.give_threads(bundle)
            return BundleAnswerer(bundle, self.answer_timeout_s, facts=facts)
        except ContractError as error:
            bundle.runner.close()
            raise BundleError(f"the bundle does not answer: {error}") from error

    def give_threads(self, bundle: LoadedBundle) -> dict[str, object]:
        """Give the plan its threads; return what `status` shows of the running code.

        Raises:
            ContractError: The plan ended with an error status.
        """
        runner = bundle.runner
        allowed = frozenset(os.sched_getaffinity(0))
        runner.cpus = cpus_for(self.cpus, allowed)
        if self.threads:
            runner.threads = self.threads
            measured: dict[int, float] = {}
        else:
            first = parse_selftest(bundle.self_test).vectors[0].runs[0]
            cores = len(runner.cpus or allowed)
            measured = dict(tune_threads(runner, first, min(cores, MAX_THREADS)).seconds)
        return {
            "threads": runner.threads,
            "threads_measured_ms": {n: round(s * 1e3, 3) for n, s in measured.items()},
            "cpus": sorted(runner.cpus) or "any",
            "weight_bytes": runner.weight_bytes,
            "huge_weight_bytes": runner.huge_weight_bytes,
        }


def _require_passed(done: "subprocess.CompletedProcess[bytes]") -> None:
    if done.returncode == 0:
        return
    if done.returncode < 0:
        raise SelfTestFailedError(f"the self-test was ended by signal {-done.returncode}")
    shown = done.stderr.decode("utf-8", "replace").strip()[-MAX_OUTPUT_SHOWN:]
    try:
        report = json.loads(done.stdout)
        shown = f"{report['failed_vectors']} of {report['vectors']} vectors differ"
    except (ValueError, KeyError, TypeError):
        pass
    raise SelfTestFailedError(f"self-test status {done.returncode}: {shown}")
