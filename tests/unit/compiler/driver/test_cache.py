"""The stage cache: whole entries or none, whatever happened to the file."""

import errno

import pytest

from compiler.driver.cache import StageCache, cache_key, scratch_directory, write_atomic

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
    StageCache(tmp_path).put("plan", KEY, PARTS)
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
