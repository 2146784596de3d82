"""Going back from a version of EdgeCard to the one before, on this machine, as a device does it.

    python -m benchmarks.rollback [--check]

A real agent with the native engine runs two versions that are compiled here, against a release
server on a local socket; each round it is told to go to the other one by an update of kind
`rollback`. Time runs from the offer to the first moment the other version answers, and to the end
of the update with all of it durable. The first installation of the same version, which downloads
and tests itself, is beside it to compare with.
"""

import platform
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.answer import CACHE
from benchmarks.runner import Claim, main
from compiler.contract.protocol import OfferKind, UpdateState
from compiler.driver.compile import compile_model
from compiler.driver.native_check import host_target
from compiler.driver.options import CompileOptions
from device_agent.ports import Ports
from device_agent.states import State
from examples.edgecard.materialise import materialise
from tests.simulators.bundles import ToyBundle, released
from tests.simulators.device import Device, toy_config
from tests.simulators.release_server import ReleaseServer

ROUNDS: Final = 10
LONGEST_S: Final = 1.0
WAIT_S: Final = 600.0
HOST: Final = "host"


class Stopwatch:
    """Notes when an agent came to its checkpoints."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def __call__(self, checkpoint: str) -> None:
        self.at[checkpoint] = perf_counter()

    def between(self, first: str, last: str) -> float:
        """Return seconds from one checkpoint to another of the same update."""
        return self.at[last] - self.at[first]


def measure() -> list[Claim]:
    """Go back and forth; return the claims."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = ReleaseServer().start()
        try:
            bundles = [server.publish(_build(version, folder)) for version in ("v1", "v2")]
            return _claims(server, folder, bundles)
        finally:
            server.stop()


def _build(version: str, folder: Path) -> ToyBundle:
    target = host_target()
    if target is None:
        raise SystemExit(f"error: no target runs on this machine ({platform.machine()})")
    options = CompileOptions(target.id, "edgecard", version, int(version[1:]), cache_dir=CACHE)
    compiled = compile_model(materialise(version, folder / version), options)
    return released(compiled)


def _claims(server: ReleaseServer, folder: Path, bundles: list[ToyBundle]) -> list[Claim]:
    watch = Stopwatch()
    config = toy_config(server, folder / "device", model="edgecard", poll_s=0.01)
    device = Device.start(server, config, Ports(checkpoint=watch))
    try:
        firsts = [_take(device, watch, bundle, OfferKind.INSTALL) for bundle in bundles]
        server.sent_bytes.clear()
        backs = [
            _take(device, watch, bundles[round_ % 2], OfferKind.ROLLBACK)
            for round_ in range(ROUNDS)
        ]
        sent = server.sent_bytes.get("blob", 0)
    finally:
        device.stop()
    size = f"{bundles[0].manifest.total_bytes / 1e6:.1f} MB"
    return [
        _claim("until it answers", backs, firsts, 0, size),
        _claim("until all is durable", backs, firsts, 1, size),
        Claim("payload", sent, "bytes", "", "", None, float(sent == 0), 1.0, HOST),
    ]


def _take(
    device: Device, watch: Stopwatch, bundle: ToyBundle, kind: OfferKind
) -> tuple[float, float]:
    """Take an update; return seconds until the bundle answers, and until the update is over."""
    update = device.server.offer(bundle, device.agent.key.device_id, kind=kind)
    device.run(lambda: update.outcome is not None and device.state is State.IDLE, WAIT_S)
    if update.outcome is not UpdateState.SUCCEEDED:
        raise SystemExit(f"error: the update ended as {update.outcome}")
    first = "verifying:before"
    return watch.between(first, "activating:after"), watch.between(first, "cleaning:after")


def _claim(
    what: str,
    backs: list[tuple[float, float]],
    firsts: list[tuple[float, float]],
    place: int,
    size: str,
) -> Claim:
    seconds = [pair[place] for pair in backs]
    worst, first = max(seconds), statistics.median(pair[place] for pair in firsts)
    return Claim(
        id=f"back to the version before, {what}: the longest of {len(seconds)}",
        value=worst,
        unit="s",
        peer="first installation",
        peer_version="",
        peer_value=first,
        ratio=LONGEST_S / worst,
        bar=1.0,
        label=HOST,
        note=f"median {statistics.median(seconds):.3f} s, {size}; the bar is {LONGEST_S:g} s",
    )


if __name__ == "__main__":
    sys.exit(main("rollback", measure, sys.argv[1:]))
