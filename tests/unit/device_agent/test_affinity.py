from pathlib import Path

import pytest

from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError
from device_agent.runtime.affinity import big_cores, cpus_for, parse_cpus

ALL = frozenset(range(8))
PHONE = {0: 290, 1: 290, 2: 290, 3: 290, 4: 870, 5: 870, 6: 870, 7: 1024}


def system(root: Path, figure: str, sizes: dict[int, object]) -> Path:
    for cpu, size in sizes.items():
        path = root / "sys" / "devices" / "system" / "cpu" / f"cpu{cpu}" / figure
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{size}\n")
    return root


@pytest.mark.parametrize("figure", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_it_takes_the_big_cores(figure: str, tmp_path: Path) -> None:
    root = system(tmp_path, figure, dict(PHONE))
    assert cpus_for("auto", ALL, root) == {4, 5, 6, 7}
    assert cpus_for("auto", frozenset({2, 3, 4}), root) == {4}
    assert cpus_for("auto", frozenset({0, 1}), root) == frozenset()


def test_capacity_is_believed_before_the_clock(tmp_path: Path) -> None:
    system(tmp_path, "cpu_capacity", dict(PHONE))
    root = system(tmp_path, "cpufreq/cpuinfo_max_freq", dict.fromkeys(ALL, 2_000_000))
    assert big_cores(ALL, root) == {4, 5, 6, 7}


def test_it_leaves_threads_alone_where_cores_are_alike_or_unknown(tmp_path: Path) -> None:
    assert big_cores(ALL, tmp_path) == frozenset()
    assert big_cores(ALL, system(tmp_path / "a", "cpu_capacity", dict.fromkeys(ALL, 1024))) == set()
    assert big_cores(ALL, system(tmp_path / "b", "cpu_capacity", {**PHONE, 3: "?"})) == set()
    some = {cpu: size for cpu, size in PHONE.items() if cpu != 5}
    assert big_cores(ALL, system(tmp_path / "c", "cpu_capacity", some)) == set()


def test_the_owner_can_say_it_or_switch_it_off(tmp_path: Path) -> None:
    root = system(tmp_path, "cpu_capacity", dict(PHONE))
    assert cpus_for("off", ALL, root) == frozenset()
    assert cpus_for("0,6-9", ALL, root) == {0, 6, 7}
    assert parse_cpus("3") == {3}
    assert AgentConfig(cpus="4-7").cpus == "4-7"


@pytest.mark.parametrize(
    "text", ["", "big", "4-", "-4", "1,,2", "7-4", "7-4,1", "\u0663", "5000", "1 2", "0-1024"]
)
def test_it_refuses_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigurationError, match="cpus"):
        AgentConfig(cpus=text)
