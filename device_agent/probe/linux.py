"""Read the capability facts of a Linux machine.

Only facts that are the same on every boot: instruction set extensions from a closed list (kernel
and mitigation flags come and go), cache sizes, memory as a bucket.
"""

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from compiler.contract.fingerprint import (
    MAX_TEXT,
    TARGET_LADDER,
    Fingerprint,
    ram_bucket_mb,
)
from compiler.contract.plan_format import ABI_VERSION
from device_agent.probe.sensors import read_file

AGENT_PLAN_ABI: Final = ABI_VERSION
_CPUINFO: Final = Path("proc/cpuinfo")
_MEMINFO: Final = Path("proc/meminfo")
_CACHES: Final = Path("sys/devices/system/cpu/cpu0/cache")
_LADDER: Final = frozenset[str]().union(*(row[2] for row in TARGET_LADDER))
_KNOWN: Final = re.compile(
    r"aes|vaes|pclmulqdq|vpclmulqdq|gfni|sha_ni|sse\w*|avx\w*|amx\w*|adx|rdrand"
    r"|asimd\w*|sve\w*|sme\w*|i8mm|bf16|fphp|sha[1235]\w*|crc32|atomics|fp"
    r"|z[vb]\w*|zfh\w*"
)
_LEVELS: Final = ("1", "2", "3")
_UNITS_KB: Final = {"K": 1, "M": 1024}
_SIZE: Final = re.compile(r"([0-9]{1,9})([KM])")
_SIZE_NUMBER: Final = re.compile(r"[0-9]{1,15}(?![0-9])")
_FEATURE_KEYS: Final = ("flags", "Features")
_NAME_KEYS: Final = ("model name", "Model", "Hardware")


def probe(*, device_class: str, isa_limit: str = "", root: Path = Path("/")) -> Fingerprint:
    """Return the fingerprint of this machine.

    Args:
        device_class: What the owner declared.
        isa_limit: Report nothing above this ISA level; the `soc` field then says so.
        root: Where `proc` and `sys` are, for tests.
    """
    cpu = _key_values(read_file(root / _CPUINFO))
    memory = _key_values(read_file(root / _MEMINFO))
    soc = _first(cpu, _NAME_KEYS) or platform.machine()
    features = isa_features(_isa_words(cpu))
    if isa_limit:
        features = limited(features, isa_limit)
        soc = f"{soc} (limited to {isa_limit})"
    caches = _cache_sizes_kb(root / _CACHES)
    total_kb = _SIZE_NUMBER.match(memory.get("MemTotal", ""))
    return Fingerprint(
        machine=platform.machine(),
        soc=_printable(soc),
        os=platform.system().lower(),
        isa_features=features,
        cores=os.cpu_count() or 1,
        l1d_kb=caches.get(1, 0),
        l2_kb=caches.get(2, 0),
        l3_kb=caches.get(3, 0),
        ram_bucket_mb=ram_bucket_mb(int(total_kb[0]) // 1024 if total_kb else 0),
        page_kb=os.sysconf("SC_PAGE_SIZE") // 1024,
        accelerator="",
        driver="",
        device_class=_printable(device_class),
        agent_abi=AGENT_PLAN_ABI,
    )


def isa_features(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the instruction set extensions among `flags`, sorted."""
    return tuple(sorted({flag for flag in flags if flag in _LADDER or _KNOWN.fullmatch(flag)}))


def _isa_words(cpu: dict[str, str]) -> list[str]:
    """Return the words of the flags, or of a RISC-V string such as `rv64imafdcv_zicsr_zvfh`."""
    base, *extensions = cpu.get("isa", "").split("_")
    letters = base.removeprefix("rv64") if base.startswith("rv64") else ""
    return [*_first(cpu, _FEATURE_KEYS).split(), *letters, *extensions]


def limited(features: Iterable[str], level: str) -> tuple[str, ...]:
    """Return `features` without what lies above the ISA `level` of the target ladder.

    A level keeps its own row of the ladder and those below; every other extension goes, because
    a processor of that level need not have it.
    """
    allowed = next(row[2] for row in TARGET_LADDER if row[0] == level)
    return tuple(sorted(set(features) & allowed))


def _key_values(content: str) -> dict[str, str]:
    """Return the first value of every key of `key : value` lines."""
    found: dict[str, str] = {}
    for line in content.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def _first(values: dict[str, str], keys: Iterable[str]) -> str:
    return next((values[key] for key in keys if values.get(key)), "")


def largest_cache_kb(root: Path = Path("/")) -> int:
    """Return the size of the processor's largest cache, KiB per instance; 0 when unknown."""
    return max(_cache_sizes_kb(root / _CACHES).values(), default=0)


def _cache_sizes_kb(folder: Path) -> dict[int, int]:
    """Return data and unified cache sizes by level, KiB per instance."""
    sizes: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        level, kind, size = (read_file(index / name).strip() for name in ("level", "type", "size"))
        match = _SIZE.fullmatch(size)
        if kind != "Instruction" and match and level in _LEVELS:
            sizes.setdefault(int(level), int(match[1]) * _UNITS_KB[match[2]])
    return sizes


def _printable(value: str) -> str:
    return "".join(ch for ch in value if ch.isprintable())[:MAX_TEXT]
