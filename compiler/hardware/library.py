"""The capability library: systems on chip as data, and the targets whose code each of them runs.

    socs.toml -> load_socs() -> Soc -> variants(soc): targets, best first; accelerators(soc)

Pages and the `targets` command show it; a release manager sees what a bundle will be on a device
that has not reported yet. A device itself is judged by what its probe reports, never by its name.
Refuses rows with unknown, missing or contradicting fields.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

from compiler.errors import CompilerError
from compiler.hardware.targets import OPENCL, TARGETS, Target

LIBRARY: Final = Path(__file__).with_name("socs.toml")
UNVERIFIED: Final = "unverified"
SYSTEMS: Final = ("linux", "darwin")
CLASSES: Final = ("phone", "pc", "car")
_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]*")
_CORES: Final = re.compile(r"[A-Za-z0-9 .-]+ x[1-9][0-9]?")
_REQUIRED: Final = frozenset(("id", "vendor", "name", "class", "arch", "cores", "features"))
_OPTIONAL: Final = frozenset(("system", "memory_gb_s", "gpu", "npu"))


class SocLibraryError(CompilerError):
    """The library has a row that makes no sense."""

    code: ClassVar[str] = "build.app.soc_library"


@dataclass(frozen=True, slots=True)
class Soc:
    """One system on chip.

    Attributes:
        id: Permanent name.
        device_class: `phone`, `pc` or `car`: where it is mostly found.
        arch: Machine name as `uname -m` gives it on Linux.
        cores: Kinds of cores with their numbers.
        features: Names in /proc/cpuinfo that every core has.
        system: `linux`, or `darwin`, whose system calls our runtime does not make.
        memory_gb_s: Published peak of the memory interface, GB/s; None if unknown.
        gpu: A GPU that takes OpenCL; empty if none is known.
        npu: Accelerator and its SDK, used by no variant; empty if none is known.
    """

    id: str
    vendor: str
    name: str
    device_class: str
    arch: str
    cores: tuple[str, ...]
    features: frozenset[str]
    system: str = "linux"
    memory_gb_s: float | None = None
    gpu: str = ""
    npu: str = ""

    @property
    def verified_on(self) -> str:
        """What was checked on such a device: nothing yet."""
        return UNVERIFIED


def variants(soc: Soc) -> tuple[Target, ...]:
    """Return the targets whose code the cores can run, best first; none of another architecture."""
    able = [t for t in TARGETS if t.arch == soc.arch and t.features <= soc.features]
    return tuple(reversed(able))


def accelerators(soc: Soc) -> tuple[Target, ...]:
    """Return the targets whose code the GPU could run; a device is never given one of them."""
    return (OPENCL,) if soc.gpu else ()


@cache
def load_socs() -> tuple[Soc, ...]:
    """Return the library, in the file's order.

    Raises:
        SocLibraryError: A row is malformed, or two share an id.
    """
    return parse_socs(LIBRARY.read_text(encoding="utf-8"))


def parse_socs(text: str) -> tuple[Soc, ...]:
    """Parse the text of a library; see `load_socs`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SocLibraryError(f"the library is no TOML: {error}") from error
    rows = document.get("soc")
    _need(document.keys() == {"soc"} and isinstance(rows, list), "it holds [[soc]] tables only")
    assert isinstance(rows, list)
    socs = tuple(_row(row) for row in rows)
    ids = [soc.id for soc in socs]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    _need(not twice, f"two rows are called {twice[:1]}")
    return socs


def _row(row: Mapping[str, object]) -> Soc:
    where = f"row {row.get('id', '?')!r}"
    missing, unknown = _REQUIRED - row.keys(), row.keys() - _REQUIRED - _OPTIONAL
    _need(not missing, f"{where} lacks {sorted(missing)[:1]}")
    _need(not unknown, f"{where} has the unknown field {sorted(unknown)[:1]}")
    texts = {
        name: row.get(name, "") for name in ("id", "vendor", "name", "class", "arch", "gpu", "npu")
    }
    for name, value in texts.items():
        _need(isinstance(value, str), f"{where}: {name} is no text")
    soc = Soc(
        id=str(texts["id"]),
        vendor=str(texts["vendor"]),
        name=str(texts["name"]),
        device_class=str(texts["class"]),
        arch=str(texts["arch"]),
        cores=_texts(row["cores"], f"{where}: cores"),
        features=frozenset(_texts(row["features"], f"{where}: features")),
        system=str(row.get("system", "linux")),
        memory_gb_s=_bandwidth(row.get("memory_gb_s"), where),
        gpu=str(texts["gpu"]),
        npu=str(texts["npu"]),
    )
    _need(_ID.fullmatch(soc.id) is not None, f"{where}: an id is lower case")
    _need(soc.device_class in CLASSES, f"{where}: class is one of {', '.join(CLASSES)}")
    _need(soc.system in SYSTEMS, f"{where}: system is one of {', '.join(SYSTEMS)}")
    _need(bool(soc.cores), f"{where} has no cores")
    _need(all(_CORES.fullmatch(core) for core in soc.cores), f"{where}: cores are `Name xN`")
    _need(bool(variants(soc)), f"{where}: no target runs on {soc.arch} with these features")
    return soc


def _texts(value: object, where: str) -> tuple[str, ...]:
    _need(isinstance(value, list), f"{where} is no list")
    assert isinstance(value, list)
    _need(all(isinstance(item, str) for item in value), f"{where} holds something else than text")
    return tuple(value)


def _bandwidth(value: object, where: str) -> float | None:
    if value is None:
        return None
    _need(isinstance(value, float) and 0 < value < 10_000, f"{where}: memory_gb_s is out of range")
    assert isinstance(value, float)
    return value


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise SocLibraryError(f"capability library: {message}")
