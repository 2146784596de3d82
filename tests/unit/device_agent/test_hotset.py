"""The hot set: round trip, and what is not believed."""

import logging
from pathlib import Path

import pytest

from compiler.contract.expert_pool import ExpertFile
from compiler.contract.pool_abi import HEAT_ONE
from device_agent.errors import DiskError
from device_agent.runtime.hotset import (
    HOTSET_FILE,
    HotSetFile,
    hotset_bytes,
    identity_of,
    parse_hotset,
)
from device_agent.storage.disk import Disk

FILES = [ExpertFile(0, 10, digit * 64, 0) for digit in "abc"]
HEATS = (0, 77, HEAT_ONE)
IDENTITY = identity_of([file.sha256 for file in FILES])


@pytest.fixture
def hotset(tmp_path: Path) -> HotSetFile:
    return HotSetFile(Disk(), tmp_path / HOTSET_FILE)


def test_it_comes_back_as_it_was(hotset: HotSetFile) -> None:
    assert hotset.read(FILES) is None
    hotset.write(FILES, HEATS)
    assert hotset.read(FILES) == HEATS
    hotset.write(FILES, HEATS[::-1])
    assert hotset.read(FILES) == HEATS[::-1]
    assert [path.name for path in hotset.path.parent.iterdir()] == [HOTSET_FILE]


def test_every_damaged_byte_is_seen() -> None:
    good = hotset_bytes(IDENTITY, HEATS)
    assert parse_hotset(good, IDENTITY, 3) == HEATS
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(ValueError, match=r"its? "):
            parse_hotset(bytes(bad), IDENTITY, 3)
    for cut in range(len(good)):
        with pytest.raises(ValueError, match=r"its? "):
            parse_hotset(good[:cut], IDENTITY, 3)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="range"):
        parse_hotset(hotset_bytes(IDENTITY, (0, HEAT_ONE + 1, 0)), IDENTITY, 3)
    with pytest.raises(ValueError, match="other experts"):
        parse_hotset(hotset_bytes(IDENTITY, HEATS), IDENTITY, 4)


@pytest.mark.parametrize("data", [b"", b"x" * 5000, hotset_bytes(bytes(32), HEATS)])
def test_a_damaged_or_foreign_file_is_ignored_with_a_line(
    hotset: HotSetFile, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    hotset.path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert hotset.read(FILES) is None
    assert "is ignored" in caplog.text


def test_a_disk_that_refuses_costs_nothing_but_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(Disk):
        def write_atomic(self, path: Path, data: bytes) -> None:
            raise DiskError(f"no room for {len(data)} bytes at {path.name}")

    hotset = HotSetFile(FullDisk(), tmp_path / HOTSET_FILE)
    with caplog.at_level(logging.WARNING):
        hotset.write(FILES, HEATS)
    assert "cannot be kept" in caplog.text
    assert hotset.read(FILES) is None
