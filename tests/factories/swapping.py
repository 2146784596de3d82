"""Campaigns of swaps under load: another thread asks all the while and compares every bit."""

import random
import threading
import time
from collections import Counter

import numpy as np

from compiler.contract.policy import CELLS, LEGAL, Cell, Variant
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import small_decoder


def every_cell(variant: Variant) -> bytes:
    """Return a table with one variant wherever it is legal."""
    cells = map(Cell.at, range(CELLS))
    return bytes(variant if variant in LEGAL[cell.kind] else 0 for cell in cells)


STEP = {
    "token_ids": np.array([[3], [7], [11]], np.int32),
    "positions": np.arange(3, dtype=np.int32)[:, None],
}


class Load:
    """A thread that runs a program over and over; counts answers of other bits."""

    def __init__(self, ask) -> None:
        self.asked = self.wrong = 0
        self._ask, self._stop = ask, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.wrong += not self._ask()
            self.asked += 1

    def __enter__(self) -> "Load":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.thread.join()


def swap_policies(count: int) -> dict[str, int]:
    """Publish `count` tables while another thread runs the plan on two threads.

    A run is torn if its meters do not all belong to one table: every cell of the step must have
    been metered equally often by each table.
    """
    source = random.Random(5)
    tables = [*map(every_cell, Variant)]
    for _ in range(8):
        picks = (source.choice(LEGAL[Cell.at(index).kind]) for index in range(CELLS))
        tables.append(bytes(picks))
    case = Case.of(small_decoder(5))
    epochs: set[int] = set()
    published, most_held = [], 0
    with case.native(native_targets()[0]) as native:
        native.threads = 2
        expected = raw(native.run("step", STEP))

        def ask() -> bool:
            native.kv_length = 0
            same = raw(native.run("step", STEP)) == expected
            epochs.add(native.epoch)
            return same

        with Load(ask) as load:
            for number in range(count):
                published.append(native.policy.publish(tables[number % len(tables)]))
                most_held = max(most_held, native.policy.held)
                before = load.asked
                if number % 10 == 0:  # let a run go by now and then
                    while load.asked == before:
                        time.sleep(1e-4)
        native.policy.publish(tables[0])
        program = next(part for part in native.plan.programs if part.name == "step")
        looked_up = (native.policy_cell("step", at, 3) for at in range(len(program.calls)))
        per_cell = Counter(Cell.at(index) for index in looked_up)
        cells, torn = tuple(per_cell), 0
        for table in published:
            readings = table.readings()
            runs = {readings.get(cell.index, (0, 0))[1] / per_cell[cell] for cell in cells}
            torn += len(runs) != 1
        return {
            "swaps": count,
            "asked": load.asked,
            "wrong": load.wrong,
            "torn": torn,
            "most_held": most_held,
            "epochs_seen": len(epochs),
            "left": native.policy.held,
        }
