"""What a device says of itself: sensors from files, measurements within their time."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from device_agent.cli import main
from device_agent.probe import sensors, speed
from device_agent.probe.hardware import BUDGET_S, HardwareProbe
from device_agent.probe.linux import probe

MIB = 1024 * 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def ticking(step: float) -> Callable[[], float]:
    ticks: Iterator[int] = count()
    return lambda: next(ticks) * step


class TestSensors:
    def test_a_phone_says_all_of_it(self, tmp_path: Path) -> None:
        root = write(
            tmp_path,
            {
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1804800\n",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
                "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "1804800\n",
                "sys/devices/system/cpu/cpu7/cpufreq/scaling_cur_freq": "2841600\n",
                "sys/devices/system/cpu/cpu7/cpufreq/cpuinfo_max_freq": "3187200\n",
                "sys/class/thermal/thermal_zone0/type": "cpu-1-7\n",
                "sys/class/thermal/thermal_zone0/temp": "61500\n",
                "sys/class/thermal/thermal_zone1/type": "battery\n",
                "sys/class/thermal/thermal_zone1/temp": "-1000\n",
                "sys/class/power_supply/battery/type": "Battery\n",
                "sys/class/power_supply/battery/capacity": "73\n",
                "sys/class/power_supply/battery/status": "Discharging\n",
                "sys/class/power_supply/battery/voltage_now": "4000000\n",
                "sys/class/power_supply/battery/current_now": "-500000\n",
                "sys/class/power_supply/battery/charge_now": "3000000\n",
                "dev/kgsl-3d0": "",
            },
        )
        assert sensors.clock_mhz(root) == 2841.6
        assert sensors.top_clock_mhz(root) == 3187.2
        assert sensors.governor(root) == "schedutil"
        assert [(z.kind, z.celsius) for z in sensors.thermal_zones(root)] == [
            ("cpu-1-7", 61.5),
            ("battery", -1.0),
        ]
        (battery,) = sensors.batteries(root)
        assert (battery.percent, battery.is_discharging) == (73, True)
        assert battery.watts == pytest.approx(2.0)
        assert battery.joules == pytest.approx(4.0 * 3.0 * 3600)
        assert sensors.accelerators(root) == ("adreno-gpu",)

    def test_a_machine_without_sensors_has_none(self, tmp_path: Path) -> None:
        assert sensors.clock_mhz(tmp_path) is None
        assert sensors.top_clock_mhz(tmp_path) is None
        assert sensors.governor(tmp_path) is None
        assert sensors.thermal_zones(tmp_path) == ()
        assert sensors.batteries(tmp_path) == ()
        assert sensors.accelerators(tmp_path) == ()

    @pytest.mark.parametrize("nonsense", ["", "hot", "-274000", "999000000", "1" * 40, "\0\xff"])
    def test_nonsense_is_not_a_temperature(self, tmp_path: Path, nonsense: str) -> None:
        folder = "sys/class/thermal/thermal_zone0"
        write(tmp_path, {f"{folder}/temp": nonsense, f"{folder}/type": "soc"})
        assert sensors.thermal_zones(tmp_path) == ()

    def test_a_battery_that_says_little_is_not_empty(self, tmp_path: Path) -> None:
        folder = "sys/class/power_supply/BAT0"
        root = write(
            tmp_path,
            {
                f"{folder}/type": "Battery",
                f"{folder}/capacity": "250",
                "sys/class/power_supply/mouse/type": "Battery",
                "sys/class/power_supply/mouse/scope": "Device",
                "sys/class/power_supply/AC/type": "Mains",
            },
        )
        (battery,) = sensors.batteries(root)
        assert battery == sensors.Battery(None, None, None, None)

    def test_other_nonsense_is_unknown_too(self, tmp_path: Path) -> None:
        supply = "sys/class/power_supply/BAT0"
        root = write(
            tmp_path,
            {
                "proc/cpuinfo": "cpu MHz\t: 1.2.3\ncpu MHz\t: .\n",
                "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 1000 kB\n",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "slow\x07\n",
                f"{supply}/type": "Battery",
                f"{supply}/voltage_now": "-4000000",
                f"{supply}/charge_now": "3000000",
                "sys/devices/system/cpu/cpu0/cache/index0/level": "\u00b2",
                "sys/devices/system/cpu/cpu0/cache/index0/type": "Data",
                "sys/devices/system/cpu/cpu0/cache/index0/size": "9" * 5000 + "K",
                "sys/devices/system/cpu/cpu0/cache/index1/level": "3",
                "sys/devices/system/cpu/cpu0/cache/index1/type": "Unified",
                "sys/devices/system/cpu/cpu0/cache/index1/size": "32M",
            },
        )
        assert sensors.clock_mhz(root) is None
        assert sensors.memory_pressure(root) is None
        assert sensors.governor(root) == "slow"
        assert sensors.batteries(root)[0].joules is None
        found = probe(device_class="pc", root=root)
        assert (found.l1d_kb, found.l3_kb) == (0, 32 * 1024)
        (root / "proc/meminfo").write_text(f"MemTotal: {'9' * 5000} kB\nMemAvailable: 1 kB\n")
        assert sensors.memory_pressure(root) is None
        assert probe(device_class="pc", root=root).ram_bucket_mb == 512

    def test_a_virtual_machine_tells_its_clock_elsewhere(self, tmp_path: Path) -> None:
        write(tmp_path, {"proc/cpuinfo": "cpu MHz\t\t: 2596.0\ncpu MHz\t\t: 3100.5\n"})
        assert sensors.clock_mhz(tmp_path) == 3100.5


class TestSpeed:
    def test_the_figures_are_bytes_over_the_best_time(self, tmp_path: Path) -> None:
        moved = speed.ARRAYS * (speed.ARRAY_BYTES // 8) * 8
        assert speed.memory_bytes_per_s(100.0, ticking(0.5)) == pytest.approx(moved / 0.5)
        (tmp_path / "weights").write_bytes(bytes(3 * MIB))
        read = speed.storage_bytes_per_s(tmp_path, 100.0, ticking(1.0))
        assert read is not None
        assert read > 0

    def test_without_time_or_a_file_nothing_is_known(self, tmp_path: Path) -> None:
        assert speed.memory_bytes_per_s(0.0, ticking(1.0)) is None
        assert speed.storage_bytes_per_s(tmp_path, 100.0) is None
        (tmp_path / "small").write_bytes(bytes(MIB - 1))
        assert speed.storage_bytes_per_s(tmp_path, 100.0) is None
        (tmp_path / "large").write_bytes(bytes(2 * MIB))
        assert speed.storage_bytes_per_s(tmp_path, 0.0, ticking(1.0)) is None


class TestProbe:
    def test_what_no_sensor_says_is_unknown_and_why(self, tmp_path: Path) -> None:
        probed = HardwareProbe(
            lambda: probe(device_class="phone", root=tmp_path),
            tmp_path,
            tmp_path,
            ticking(BUDGET_S),
        ).run()
        told = {name: reading.text for name, reading in probed.readings.items()}
        assert told.pop("accelerators") == "none"
        assert all(text.startswith("unknown (") for text in told.values())
        text = probed.to_text().splitlines()
        assert "l2_kb: unknown" in text
        assert "temperature: unknown (no sensor)" in text
        document = probed.to_json()
        assert document["unknown"]["temperature"] == "no sensor"
        assert document["readings"]["temperature"] is None

    def test_power_is_a_drain_only_on_battery(self, tmp_path: Path) -> None:
        folder = "sys/class/power_supply/battery"
        files = {f"{folder}/type": "Battery", f"{folder}/power_now": "2500000"}
        for status, expected in (("Discharging", 2.5), ("Charging", None)):
            root = write(tmp_path, {**files, f"{folder}/status": status})
            run = HardwareProbe(lambda: probe(device_class=""), root, root, ticking(1.0)).run()
            assert run.readings["battery_drain"].value == expected

    def test_the_command_prints_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("device_agent.cli.set_up_log", lambda verbose: None)
        assert main(["probe", "--json", "--state-dir", str(tmp_path)]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["fingerprint"]["cores"] >= 1
        assert document["readings"].keys() >= {"memory_bandwidth", "clock", "battery"}
        assert main(["probe", "--state-dir", str(tmp_path)]) == 0
        assert "memory_bandwidth: " in capsys.readouterr().out
