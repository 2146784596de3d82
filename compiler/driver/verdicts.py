"""Verdicts of the native self-test, kept.

A verdict may be reused only where running the test again could not tell anything new: the same
bytes of every section (kernels, plan, weights and expected answers), checked by the same compiler
sources, on a processor that calls itself the same and offers the same features - or under the same
emulator. Only passes are kept; a failure is looked at again every time. `recheck` runs the test
whatever is kept, for a machine that is not trusted any more.
"""

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object, sha256_hex
from compiler.contract.errors import ContractError
from compiler.driver.cache import StageCache, cache_key
from compiler.driver.native_check import CPU_INFO, Measured, NativeCheck, host_features
from compiler.driver.provenance import compiler_digest, section_digests
from compiler.hardware.targets import Target

STAGE: Final = "verdict"
TIMES: Final = "times"
_CPU_FIELDS: Final = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "microcode"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)


def verdict_key(
    sections: Mapping[str, bytes], target: Target, emulator: tuple[str, ...] | None
) -> str:
    """Return the key of a check: see the head of this module."""
    facts: dict[str, Json] = {
        "sections": dict(section_digests(sections)),
        "target": target.id,
        "compiler": compiler_digest(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "features": sorted(host_features()),
        "processor": processor(),
        "emulator": list(emulator or ()),
        "emulator_sha256": _program_digest(emulator[0]) if emulator else "",
    }
    return cache_key(STAGE, facts)


def find_verdict(cache: StageCache, key: str) -> NativeCheck | None:
    """Return the verdict kept under `key`, or None."""
    parts = cache.get(STAGE, key)
    if parts is None:
        return None
    try:
        document = parse_object(parts["check"])
    except (ContractError, KeyError):
        return None
    verified_on, detail = document.get("verified_on"), document.get("detail")
    if not isinstance(verified_on, str) or not isinstance(detail, Mapping):
        return None
    return NativeCheck(verified_on, {**detail, "kept": True})


def find_times(cache: StageCache, key: str) -> Measured | None:
    """Return the times of calls that were taken when the verdict under `key` was, or None."""
    parts = cache.get(TIMES, key)
    return None if parts is None else Measured.from_json(parts["times"])


def keep_times(cache: StageCache, key: str, times: Measured) -> None:
    """Keep the times of calls."""
    cache.put(TIMES, key, {"times": times.to_json().encode()})


def keep_verdict(cache: StageCache, key: str, check: NativeCheck) -> None:
    """Keep a check that passed."""
    document: dict[str, Json] = {"verified_on": check.verified_on, "detail": dict(check.detail)}
    cache.put(STAGE, key, {"check": canonical_bytes(document)})


def processor() -> dict[str, Json]:
    """Return what /proc/cpuinfo says about the first processor; nothing where there is none."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found: dict[str, Json] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _CPU_FIELDS:
            found[name.strip()] = value.strip()
    return found


def _program_digest(name: str) -> str:
    path = shutil.which(name)
    return sha256_hex(Path(path).read_bytes()) if path else ""
