"""The embedded queue under several writers and readers at once."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu import Connection

from builds.common.file_queue import Transport


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    Transport.global_state.clear()
    yield
    Transport.global_state.clear()


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    for name in ("messages", "control"):
        (tmp_path / name).mkdir()
    with Connection(
        "filesystem://",
        transport=Transport,
        transport_options={
            "data_folder_in": str(tmp_path / "messages"),
            "data_folder_out": str(tmp_path / "messages"),
            "control_folder": str(tmp_path / "control"),
        },
    ) as opened:
        yield opened


def test_it_delivers_each_message_once_in_order(connection: Connection) -> None:
    queue = connection.SimpleQueue("jobs")
    for number in range(20):
        queue.put({"number": number})
    seen = []
    for _ in range(20):
        message = queue.get(timeout=60)
        seen.append(message.payload["number"])
        message.ack()
    assert seen == list(range(20))
    with pytest.raises(queue.Empty):
        queue.get(block=False)


def test_it_drops_a_message_that_cannot_be_read(connection: Connection, tmp_path: Path) -> None:
    queue = connection.SimpleQueue("jobs")
    (tmp_path / "messages" / "0_torn.jobs.msg").write_bytes(b"")
    queue.put({"number": 1})
    assert queue.get(timeout=60).payload == {"number": 1}


def test_it_leaves_nothing_behind(connection: Connection, tmp_path: Path) -> None:
    queue = connection.SimpleQueue("jobs")
    queue.put({"number": 1})
    queue.get(timeout=60).ack()
    assert list((tmp_path / "messages").iterdir()) == []


def test_it_shares_messages_among_readers_without_a_twin(tmp_path: Path) -> None:
    for name in ("messages", "control"):
        (tmp_path / name).mkdir()
    options = {
        "data_folder_in": str(tmp_path / "messages"),
        "data_folder_out": str(tmp_path / "messages"),
        "control_folder": str(tmp_path / "control"),
    }
    seen: list[int] = []
    lock, all_are_in = threading.Lock(), threading.Event()

    def read() -> None:
        with Connection("filesystem://", transport=Transport, transport_options=options) as own:
            queue = own.SimpleQueue("jobs")
            while True:
                was_complete = all_are_in.is_set()
                try:
                    message = queue.get(timeout=0.5)
                except queue.Empty:
                    if was_complete:
                        return
                    continue
                message.ack()
                with lock:
                    seen.append(message.payload["number"])

    readers = [threading.Thread(target=read) for _ in range(3)]
    with Connection("filesystem://", transport=Transport, transport_options=options) as own:
        queue = own.SimpleQueue("jobs")
        for reader in readers:
            reader.start()
        for number in range(100):
            queue.put({"number": number})
        all_are_in.set()
        for reader in readers:
            reader.join()
    assert sorted(seen) == list(range(100))
