"""Whole plans swapped under load, in a process of its own, whose maps and descriptors are counted.

python -m tests.factories.plan_swapping COUNT FOLDER     prints what happened as one JSON object

Two bundles of one model differ in their kernels alone (x86-64-v1 and v3), so they share weights.
The agent's own engine starts one beside the other; the host swaps them while a thread asks.
"""

import gc
import hashlib
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from compiler.contract.session import Buffer
from device_agent.runtime import assembly
from device_agent.runtime.engine import NativeEngine
from device_agent.runtime.evaluation import load_evaluation
from device_agent.runtime.host import SessionHost
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer
from tests.factories.bundles import compiled, submission
from tests.factories.swapping import Load

TARGETS = ("x86-64-v1", "x86-64-v3")
QUESTIONS = 3
WARM_UP = 60


class HashingRunner(assembly.TimeoutRunner):
    """Adds every output byte of every run to one digest."""

    digest = hashlib.sha256()

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        outputs = super().run(program, inputs)
        for role in sorted(outputs):
            self.digest.update(outputs[role])
        return outputs


def install(folder: Path) -> tuple[ObjectStore, list[Pointer]]:
    """Put both bundles into a store."""
    store = ObjectStore(Disk(), folder, max_bytes=1 << 30)
    pointers = []
    for target in TARGETS:
        bundle = compiled("v1", target, folder)
        for section in bundle.manifest.sections:
            store.put(bundle.sections[section.component], section.sha256)
        data = bundle.manifest.to_bytes()
        store.put(data, bundle.manifest.sha256)
        pointers.append(Pointer(bundle.manifest.sha256, len(data), target, 0))
    return store, pointers


def resources() -> dict[str, int]:
    """Return what a leak would show in, after everything that can go has gone."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    status = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return {
        "maps": len(maps),
        "kernels": sum("sparsefleet-kernels" in line for line in maps),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count(),
        "rss_kib": int(status.split()[0]),
    }


def main(count: int, folder: Path) -> dict[str, object]:
    store, pointers = install(folder)
    engine = NativeEngine(store, folder, 60.0, 60.0, threads=2)
    host = SessionHost()
    cards = load_evaluation(submission("v1", folder) / "evaluation.json").cards
    questions = cards[0][:QUESTIONS]
    assembly.TimeoutRunner = HashingRunner
    seen: set[str] = set()
    bundles: set[str] = set()

    def ask() -> bool:
        HashingRunner.digest = hashlib.sha256()
        for question in questions:
            record = host.answer(question)
            bundles.add(record.manifest_sha256)
            HashingRunner.digest.update(" ".join((record.outcome, *record.words)).encode())
        seen.add(HashingRunner.digest.hexdigest())
        return True

    host.swap(engine.start(pointers[0]))
    ask()
    before: dict[str, int] = {}
    pools = set()
    with Load(ask) as load:
        for number in range(1, WARM_UP + count + 1):
            host.swap(engine.start(pointers[number % 2]))
            pools.add(len(engine.weights))
            if number == WARM_UP:
                before = resources()
        after = resources()
    host.swap(None)
    return {
        "swaps": count,
        "asked": load.asked,
        "different_answers": len(seen),
        "bundles": len(bundles),
        "weights_in_memory": sorted(pools),
        "before": before,
        "after": after,
        "closed": resources(),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]))))
