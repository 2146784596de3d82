"""Send what the spool holds, oldest first, until the server or the network says stop."""

import logging
from collections.abc import Callable, Mapping

from device_agent.errors import AgentError, RefusedError, UnauthorizedError
from device_agent.telemetry.counters import Counters
from device_agent.telemetry.spool import Spool

Running = Callable[[], tuple[str, Mapping[str, object]]]

log = logging.getLogger("device_agent.telemetry")


class Uploader:
    """Cuts and uploads; belongs to one thread."""

    def __init__(
        self, counters: Counters, spool: Spool, send: Callable[[bytes], None], running: Running
    ) -> None:
        """Take the parts.

        Args:
            counters: What was counted.
            spool: Keeps batches until the server took them.
            send: Uploads one.
            running: Manifest and facts of the bundle that answers now.
        """
        self._counters = counters
        self._spool = spool
        self._send = send
        self._running = running

    def run_once(self) -> int:
        """Cut a batch, then upload what waits; return how many batches the server took.

        Raises:
            DiskError: The batch could not be kept; what was counted in it is lost.
        """
        for batch in self._counters.cut(*self._running()):
            self._spool.put(batch)
        taken = 0
        for path, data in self._spool.waiting():
            try:
                self._send(data)
            except UnauthorizedError:
                break
            except RefusedError as error:
                self._spool.refuse(path, str(error))
                continue
            except AgentError as error:
                log.debug("telemetry waits: %s", error)
                break
            self._spool.done(path)
            taken += 1
        return taken
