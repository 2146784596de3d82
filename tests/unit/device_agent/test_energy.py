"""Energy: counters where there are any, else a model that says so; unknown is never zero."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError
from device_agent.probe import power
from device_agent.probe.hardware import BUDGET_S, HardwareProbe
from device_agent.probe.linux import probe
from device_agent.probe.sensors import batteries
from device_agent.runtime.energy import (
    FIT_EVERY,
    UNVERIFIED,
    EnergyFitError,
    EnergyMeter,
    EnergyModel,
    Work,
    configured,
    fit,
)

ZONE = "sys/class/powercap/intel-rapl:0"
BATTERY = "sys/class/power_supply/battery"
WORK = Work(0.5, 1e9, 2e9)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def rapl(root: Path, microjoules: int) -> Path:
    return write(
        root,
        {
            f"{ZONE}/energy_uj": microjoules,
            f"{ZONE}/max_energy_range_uj": 1_000_000,
            f"{ZONE}:0/energy_uj": 5,
            f"{ZONE}:0/max_energy_range_uj": 1_000_000,
        },
    )


class TestCounters:
    def test_a_package_counts_once_and_wraps(self, tmp_path: Path) -> None:
        before = power.rapl(rapl(tmp_path, 900_000))
        after = power.rapl(rapl(tmp_path, 100_000))
        assert before is not None and after is not None  # noqa: PT018
        assert before.microjoules == {"intel-rapl:0": 900_000}
        assert power.joules_between(before, after) == pytest.approx(0.2)
        other = replace(after, microjoules={"intel-rapl:1": 5})
        assert power.joules_between(before, other) is None

    @pytest.mark.parametrize("text", ["", "-5", "many", "9" * 30])
    def test_what_is_no_count_is_no_counter(self, tmp_path: Path, text: str) -> None:
        root = rapl(tmp_path, 5)
        (root / ZONE / "energy_uj").write_text(text)
        assert power.rapl(root) is None

    def test_the_meter_takes_rapl_before_the_battery(self, tmp_path: Path) -> None:
        root = rapl(tmp_path, 100_000)
        write(root, {f"{BATTERY}/type": "Battery", f"{BATTERY}/status": "Discharging"})
        write(root, {f"{BATTERY}/power_now": 3_000_000})
        meter = EnergyMeter(root=root)
        meter.begin()
        rapl(root, 600_000)
        found = meter.answered(WORK)
        assert (found.joules, found.source) == (pytest.approx(0.5), "rapl")
        assert meter.watts() == pytest.approx(1.0)
        assert meter.facts()["model"] is None
        (root / ZONE / "energy_uj").unlink()
        found = meter.answered(WORK)
        assert (found.joules, found.source) == (pytest.approx(1.5), "battery")
        assert meter.facts()["watts_while_answering"] == pytest.approx(3.0)


class TestModel:
    def test_without_a_counter_it_says_that_it_estimates(self, tmp_path: Path) -> None:
        meter = EnergyMeter(root=tmp_path, tdp_watts=4.0)
        assert meter.gauges() == {}
        assert meter.facts()["source"] is None
        meter.begin()
        found = meter.answered(WORK)
        assert found.source == "model"
        assert found.joules == pytest.approx(0.5 * 0.5 + 1e9 * 160e-12 + 2e9 * 1.2e-12)
        assert meter.watts() is None, "an estimate moves no rule"
        facts = meter.facts()
        assert facts["tdp_watts"] == 4.0
        model = facts["model"]
        assert isinstance(model, dict)
        assert (model["verified_on"], model["error"]) == ("unverified", None)
        assert "Horowitz" in model["origin"]
        assert meter.gauges() == {
            "energy_uj_per_answer": round(found.joules * 1e6),
            "energy_is_model": 1,
        }

    def test_it_is_fitted_to_a_counter_and_tells_its_error(self) -> None:
        truth = EnergyModel(1.5, 80e-12, 2e-12, "", None, "")
        noise = np.random.default_rng(1)
        samples = []
        for seconds, size, operations in itertools.product((0.1, 1.0), (1e8, 1e10), (1e8, 1e11)):
            for _ in range(4):
                work = Work(seconds, size, operations)
                samples.append((work, truth.joules(work) * noise.normal(1.0, 0.01)))
        found = fit(samples)
        assert found.idle_watts == pytest.approx(1.5, rel=0.05)
        assert found.joules_per_byte == pytest.approx(80e-12, rel=0.05)
        assert found.joules_per_operation == pytest.approx(2e-12, rel=0.05)
        assert found.verified_on == "host"
        assert found.error == pytest.approx(0.01, abs=0.006)

    def test_samples_that_say_too_little_are_refused(self) -> None:
        with pytest.raises(EnergyFitError, match="samples above 0 J"):
            fit([(WORK, 1.0)] * 3)
        with pytest.raises(EnergyFitError, match="apart"):
            fit([(Work(n, n * 1e9, n * 2e9), 1.0 * n) for n in range(1, 30)])
        shrinking = [
            (Work(s, b, o), 10.0 * s + 1e-9 * b - 1e-12 * o)
            for s, b, o in itertools.product((1.0, 2.0, 3.0), (1e9, 2e9), (1e11, 9e11, 1e12))
        ]
        with pytest.raises(EnergyFitError, match="below zero"):
            fit(shrinking)


class TestCalibration:
    def test_a_counter_fits_the_model_while_it_answers(self, tmp_path: Path) -> None:
        truth = EnergyModel(2.0, 100e-12, 3e-12, "", None, "")
        meter, used = EnergyMeter(root=rapl(tmp_path, 0)), 0.0
        mixed = itertools.cycle(itertools.product((0.01, 0.1), (1e7, 1e9), (1e7, 1e10)))
        assert meter.facts()["fitted"] == "too few answers by a counter"
        for seconds, size, operations in itertools.islice(mixed, FIT_EVERY):
            work = Work(seconds, size, operations)
            meter.begin()
            used += truth.joules(work) * 1e6
            rapl(tmp_path, round(used) % 1_000_000)
            meter.answered(work)
        fitted = meter.facts()["fitted"]
        assert isinstance(fitted, dict)
        assert fitted["idle_watts"] == pytest.approx(2.0, rel=0.02)
        assert fitted["joules_per_byte"] == pytest.approx(100e-12, rel=0.02)
        assert fitted["verified_on"] == "host"

    def test_answers_that_are_alike_say_why_they_do_not(self, tmp_path: Path) -> None:
        meter = EnergyMeter(root=rapl(tmp_path, 0))
        for at in range(1, FIT_EVERY + 1):
            meter.begin()
            rapl(tmp_path, 5_000 * at)
            meter.answered(WORK)
        assert "apart" in str(meter.facts()["fitted"])

    def test_its_figures_are_a_setting_elsewhere(self) -> None:
        model = configured("0.8, 9e-11,2e-12")
        assert (model.idle_watts, model.joules_per_byte, model.origin) == (0.8, 9e-11, "configured")
        assert model.verified_on == "unverified"

    @pytest.mark.parametrize("text", ["1,2", "1,2,x", "1,2,-3", "1,2,nan", "1,2,inf", "1 2 3"])
    def test_other_settings_are_refused_with_a_reason(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="three numbers"):
            AgentConfig(energy_model=text)


class TestDrain:
    @staticmethod
    def battery(root: Path, percent: int, charge: int, status: str = "Discharging") -> None:
        write(
            root,
            {
                f"{BATTERY}/type": "Battery",
                f"{BATTERY}/status": status,
                f"{BATTERY}/capacity": percent,
                f"{BATTERY}/energy_now": charge,
            },
        )

    def test_it_is_told_per_active_hour_once_there_is_enough_of_it(self, tmp_path: Path) -> None:
        meter = EnergyMeter(root=tmp_path)
        self.battery(tmp_path, 80, 10_000_000)
        meter.answered(replace(WORK, seconds=500.0))
        assert "battery_j_per_active_hour" not in meter.gauges()
        self.battery(tmp_path, 78, 9_500_000)
        meter.answered(replace(WORK, seconds=400.0))
        gauges = meter.gauges()
        assert gauges["battery_millipercent_per_active_hour"] == 8_000
        assert gauges["battery_j_per_active_hour"] == 7_200

    def test_each_ten_minutes_of_answering_are_a_window(self, tmp_path: Path) -> None:
        meter, told = EnergyMeter(root=tmp_path), []
        for at, percent in enumerate((80, 79, 79, 78, 77, 77, 75)):
            self.battery(tmp_path, percent, 10_000_000)
            told.append(meter.answered(replace(WORK, seconds=0.0 if not at else 300.0)).drain)
        assert told == [None, None, 6.0, None, 12.0, None, 12.0]

    def test_no_model_ever_says_what_a_battery_lost(self, tmp_path: Path) -> None:
        meter = EnergyMeter(root=tmp_path)
        found = [meter.answered(replace(WORK, seconds=700.0)) for _ in range(3)]
        assert {(each.source, each.drain) for each in found} == {("model", None)}
        for status in ("Charging", "Full", "Unknown"):
            self.battery(tmp_path, 80, 10_000_000, status)
            assert meter.answered(replace(WORK, seconds=700.0)).drain is None

    def test_a_counter_that_knows_what_is_full_is_finer_than_percents(self, tmp_path: Path) -> None:
        self.battery(tmp_path, 80, 39_990_000)
        write(tmp_path, {f"{BATTERY}/energy_full": 50_000_000})
        assert batteries(tmp_path)[0].percent == pytest.approx(79.98)
        write(tmp_path, {f"{BATTERY}/energy_full": 0})
        assert batteries(tmp_path)[0].percent == 80

    def test_charging_begins_anew(self, tmp_path: Path) -> None:
        meter = EnergyMeter(root=tmp_path)
        for status in ("Discharging", "Charging", "Discharging"):
            self.battery(tmp_path, 80, 10_000_000, status)
            meter.answered(replace(WORK, seconds=550.0))
        assert meter.facts()["battery_percent_per_active_hour"] is None


@pytest.mark.parametrize("has_counter", [True, False])
def test_the_probe_says_what_counts(tmp_path: Path, has_counter: bool) -> None:
    root = rapl(tmp_path, 5) if has_counter else tmp_path
    ticks = itertools.count()
    run = HardwareProbe(
        lambda: probe(device_class="", root=root), root, root, lambda: next(ticks) * BUDGET_S
    ).run()
    text = run.readings["energy_counter"].text
    assert text == (
        "rapl" if has_counter else "unknown (no counter: a model estimates energy, unverified)"
    )
    assert UNVERIFIED.verified_on == "unverified"
