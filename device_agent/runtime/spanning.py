"""One plan over two back ends: pictures on one, words on the other, and slices of both at once.

    slice k+1 -(see)-> eyes[(k+1) % 2]          in a thread of its own
    slice k   -(prefill)-> voice                meanwhile, from where the eyes left its rows

The cut lies between programs: `see` gives rows, `prefill` and `step` keep them in the cache, so the
back end that runs those has the cache. What goes over is a `Record` per role: where the rows lie,
how many bytes are real, and in which epoch they were made. Rows are not copied on the way; a back
end that reads them copies them into its arena, as it does with any input. With two eyes one record
is read while the next one is made, and an eye never begins before its last record was released.

Bundles whose `see` fills the cache itself cannot be cut: they are refused. Used by one thread.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from compiler.contract.backend import Backend, BackendError
from compiler.contract.pipeline import COUNT, PREFILL, SEE, Pipeline
from compiler.contract.session import Buffer, see_inputs


@dataclass(frozen=True, slots=True)
class Record:
    """Rows that go from one back end to the other.

    Attributes:
        view: The rows, where the back end that made them left them.
        pointer: Address of the first byte.
        size_bytes: Bytes of rows that are real.
        epoch: Counts the pictures that were seen.
    """

    view: memoryview
    pointer: int
    size_bytes: int
    epoch: int

    def part(self, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop`, of the same memory.

        Raises:
            BackendError: They are not those that the record was made for.
        """
        found = self.view[start : min(stop, self.size_bytes)]
        if address_of(found) != self.pointer + start:
            raise BackendError(f"the rows of epoch {self.epoch} have moved")
        return found


class SpannedPlan:
    """A `PlanRunner` over two or three back ends of one bundle."""

    def __init__(self, eyes: Sequence[Backend], voice: Backend, pipeline: Pipeline) -> None:
        """Span initialised back ends; who made them closes them.

        Args:
            eyes: Run `see`: one, or two to see a slice while the one before is read.
            voice: Runs everything else, and has the cache.
            pipeline: Of the bundle.

        Raises:
            BackendError: `see` fills the cache itself, or there are not one or two eyes.
        """
        if PREFILL not in pipeline.programs:
            raise BackendError(
                "this bundle fills its cache while it sees: one back end has to run all of it",
                hint="bundles with adaptive pruning can be cut behind the picture",
            )
        if len(eyes) not in (1, 2) or voice in eyes:
            raise BackendError("a spanned plan has one or two eyes, and a voice beside them")
        self._eyes, self._voice, self._pipeline = tuple(eyes), voice, pipeline
        self.epoch = 0
        """Pictures seen so far."""

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return self._voice.kv_length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        self._voice.kv_length = length

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program where it belongs; see `Backend.execute`."""
        if program != SEE:
            return self._voice.execute(program, inputs)
        self.epoch += 1
        return self._eyes[self.epoch % len(self._eyes)].execute(program, inputs)

    def see_slices(self, slices: Sequence[Buffer]) -> int:
        """Put the rows of several pictures into the cache, behind what is there.

        With two eyes the next picture is seen while the rows of the one before are kept.

        Args:
            slices: Pictures, in the order in which their rows are kept: u8 pixels each.

        Returns:
            Rows that were kept.

        Raises:
            ContractError: A back end failed; the cache may hold the rows of slices before.
        """
        before = self.kv_length
        if len(self._eyes) == 1:
            for picture in slices:
                self._keep(self._look(picture))
            return self.kv_length - before
        self._see_ahead(slices)
        return self.kv_length - before

    def _see_ahead(self, slices: Sequence[Buffer]) -> None:
        """Keep each slice's rows while a thread sees the next one; it waits for a free eye."""
        free: SimpleQueue[bool] = SimpleQueue()
        made: SimpleQueue[Mapping[str, Record] | Exception] = SimpleQueue()
        for _ in self._eyes:
            free.put(item=True)

        def look() -> None:
            try:
                for picture in slices:
                    if not free.get():
                        return
                    made.put(self._look(picture))
            except Exception as error:  # noqa: BLE001 -- raised by who waits for the rows
                made.put(error)

        thread = threading.Thread(target=look, name="sparsefleet-eyes")
        thread.start()
        try:
            for _ in slices:
                records = made.get()
                if isinstance(records, Exception):
                    raise records
                self._keep(records)
                free.put(item=True)
        finally:
            free.put(item=False)
            thread.join()

    def _look(self, picture: Buffer) -> Mapping[str, Record]:
        outputs = self.run(SEE, see_inputs(self._pipeline, picture))
        count = int.from_bytes(bytes(outputs[COUNT][:4]), "little", signed=True)
        ports = self._pipeline.programs[PREFILL].inputs
        most = min(len(outputs[role]) // port.row_bytes for role, port in ports.items())
        if not 1 <= count <= most:
            raise BackendError(f"a picture of {count} tokens, at most {most}")
        return {
            role: _record(outputs[role], count * port.row_bytes, self.epoch)
            for role, port in ports.items()
        }

    def _keep(self, records: Mapping[str, Record]) -> None:
        ports = self._pipeline.programs[PREFILL].inputs
        some = next(iter(ports))
        rows = records[some].size_bytes // ports[some].row_bytes
        if records[some].epoch <= self.epoch - len(self._eyes):
            raise BackendError(f"the rows of epoch {records[some].epoch} were overwritten")
        for start in range(0, rows, self._pipeline.max_step_tokens):
            stop = start + self._pipeline.max_step_tokens
            chunk = {
                role: records[role].part(start * port.row_bytes, stop * port.row_bytes)
                for role, port in ports.items()
            }
            self._voice.execute(PREFILL, chunk)


def address_of(view: memoryview) -> int:
    """Return where the first byte of a view lies."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _record(view: memoryview, size_bytes: int, epoch: int) -> Record:
    return Record(view, address_of(view), size_bytes, epoch)
