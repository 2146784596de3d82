"""The stage cache: whole entries or none, whatever happened to the file."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from compiler.contract.canonical import canonical_bytes, sha256_hex
from compiler.driver.cache import (
    StageCache,
    StageUse,
    cache_key,
    scratch_directory,
    write_atomic,
)

KEY = cache_key("plan", {"a": 1})
PARTS = {"plan": b"abc", "empty": b"", "big": bytes(range(256)) * 40}


def _entry(cache: StageCache):
    (path,) = (path for path in cache.directory.rglob("*") if path.is_file())
    return path


@pytest.fixture
def cache(tmp_path) -> StageCache:
    return StageCache(tmp_path / "cache")


def test_it_gives_back_what_was_stored(cache) -> None:
    assert cache.get("plan", KEY) is None
    cache.put("plan", KEY, PARTS)
    assert cache.get("plan", KEY) == PARTS
    assert cache.get("kernels", KEY) is None


def test_it_has_a_key_for_everything_a_stage_depends_on() -> None:
    keys = {
        cache_key("plan", {"a": 1}),
        cache_key("plan", {"a": 2}),
        cache_key("kernels", {"a": 1}),
        cache_key("plan", {"b": 1}),
    }
    assert len(keys) == 4
    assert cache_key("plan", {"a": 1, "b": 2}) == cache_key("plan", {"b": 2, "a": 1})


@pytest.mark.parametrize("keep", [0, 4, 11, 60, -1])
def test_it_takes_a_truncated_entry_for_absent(cache, keep) -> None:
    cache.put("plan", KEY, PARTS)
    path = _entry(cache)
    path.write_bytes(path.read_bytes()[:keep])
    assert cache.get("plan", KEY) is None
    cache.put("plan", KEY, PARTS)
    assert cache.get("plan", KEY) == PARTS


def test_it_takes_an_altered_entry_for_absent(cache) -> None:
    cache.put("plan", KEY, PARTS)
    path = _entry(cache)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cache.get("plan", KEY) is None


def test_it_leaves_no_partial_file_when_the_disk_is_full(tmp_path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomic(tmp_path / "a" / "b", b"data")
    assert list((tmp_path / "a").iterdir()) == []


def test_it_loses_an_entry_that_does_not_fit_the_disk(tmp_path, monkeypatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    StageCache(tmp_path).put("plan", KEY, PARTS)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert StageCache(tmp_path).get("plan", KEY) is None


def test_it_keeps_nothing_without_a_directory() -> None:
    cache = StageCache(None)
    cache.put("plan", KEY, PARTS)
    assert cache.get("plan", KEY) is None


def test_it_removes_scratch_space_even_after_an_error() -> None:
    seen = []

    def use() -> None:
        with scratch_directory() as path:
            (path / "file").write_bytes(b"x")
            seen.append(path)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert not seen[0].exists()


def _fill(cache: StageCache, count: int) -> list[str]:
    """Store entries of 1,000 bytes and more, used one second after the other."""
    keys = [cache_key("plan", {"at": at}) for at in range(count)]
    for at, key in enumerate(keys):
        cache.put("plan", key, {"data": bytes(1000)})
        os.utime(cache.directory / "plan" / key[:2] / key, (at, at))
    return keys


def test_it_forgets_what_was_used_longest_ago(tmp_path) -> None:
    cache = StageCache(tmp_path, limit_bytes=6_000)
    keys = _fill(cache, 8)
    assert cache.get("plan", keys[0]) is not None  # used now: the oldest no more
    removed = cache.trim()
    kept = [key for key in keys if cache.get("plan", key) is not None]
    assert kept == [keys[0], *keys[-len(kept) + 1 :]]
    assert 3 <= len(kept) <= 5
    assert removed > 2_000
    assert cache.trim() == 0
    assert cache.use_by_stage()["plan"].size_bytes <= 6_000


def test_it_counts_but_never_trims_what_belongs_to_the_c_compiler(tmp_path) -> None:
    cache = StageCache(tmp_path, limit_bytes=0)
    foreign = tmp_path / "toolchain" / "zig" / "h"
    foreign.mkdir(parents=True)
    (foreign / "manifest").write_bytes(b"x" * 10)
    built = tmp_path / "toolchain" / KEY[:2] / f"{KEY}.so"
    built.parent.mkdir()
    built.write_bytes(b"y" * 20)
    assert cache.use_by_stage() == {"toolchain": StageUse(2, 30)}
    assert cache.trim() == 20
    assert (foreign / "manifest").exists()


def test_it_leaves_alone_what_it_did_not_write(tmp_path) -> None:
    """A cache may be pointed at a folder that holds somebody's files."""
    cache = StageCache(tmp_path, limit_bytes=0)
    strange = ("letter.txt", "plan/letter.txt", "a/b/c/d", "plan/ab/letter", f"ab/{KEY}", KEY)
    for name in strange:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"dear")
    leftover = tmp_path / "toolchain" / "ab" / ".build-x" / "out"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(bytes(7))
    (tmp_path / "plan" / "ab" / "tmpx.partial").write_bytes(bytes(3))
    cache.put("plan", KEY, PARTS)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert cache.trim() == size - 4 * len(strange)
    assert {name for name in strange if (tmp_path / name).exists()} == set(strange)
    assert not leftover.exists()
    assert cache.use_by_stage() == {}


def test_it_takes_an_entry_with_an_altered_table_for_absent(cache) -> None:
    cache.put("plan", KEY, PARTS)
    path = _entry(cache)
    whole = path.read_bytes()
    for at in range(whole.index(b"sha256")):
        for bit in (1, 4, 16):
            data = bytearray(whole)
            data[at] ^= bit
            path.write_bytes(data)
            assert cache.get("plan", KEY) is None
    for table in ("[1]", "[[]]", "[[1,2]]", '[["plan",-1]]', '[["plan",99]]', "null", "{}"):
        parts = json.loads(table)
        digest = sha256_hex(canonical_bytes({"parts": parts}) + b"abc")
        header = canonical_bytes({"parts": parts, "sha256": digest})
        path.write_bytes(b"SFCACHE2" + len(header).to_bytes(4, "little") + header + b"abc")
        assert cache.get("plan", KEY) is None


def test_it_survives_readers_writers_and_trimmers_at_once(tmp_path) -> None:
    cache = StageCache(tmp_path, limit_bytes=8_000)
    keys = [cache_key("plan", {"at": at}) for at in range(24)]
    parts = {key: {"data": key.encode() * 20} for key in keys}

    def use(turn: int) -> int:
        key = keys[turn % len(keys)]
        cache.put("plan", key, parts[key])
        found = cache.get("plan", key)
        assert found in (None, parts[key])
        return cache.trim()

    with ThreadPoolExecutor(8) as pool:
        removed = sum(pool.map(use, range(240)))
    assert removed > 0
    cache.trim()
    assert cache.use_by_stage()["plan"].size_bytes <= 8_000
    assert not list(tmp_path.rglob("*.partial"))
