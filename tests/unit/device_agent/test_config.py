from pathlib import Path

import pytest

from device_agent.config import AgentConfig, load_config
from device_agent.errors import ConfigurationError


def load(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> AgentConfig:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return load_config(path, environment=environment or {})


def test_it_takes_defaults_then_file_then_environment_then_options(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('[agent]\nserial = "file"\nmodel = "file"\npoll_s = 3\nname = "file"\n')
    environment = {
        "SPARSEFLEET_AGENT_MODEL": "env",
        "SPARSEFLEET_AGENT_POLL_S": "7.5",
        "SPARSEFLEET_AGENT_NAME": "env",
        "OTHER": "x",
    }
    config = load_config(path, {"name": "option", "claim": None}, environment)
    assert (config.serial, config.model, config.poll_s, config.name) == (
        "file",
        "env",
        7.5,
        "option",
    )
    assert config.telemetry_s == AgentConfig().telemetry_s


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("serail = 'x'", "unknown setting"),
        ("poll_s = 'soon'", "poll_s"),
        ("poll_s = -1", "poll_s"),
        ("poll_s = inf", "poll_s"),
        ("telemetry_s = 0", "telemetry_s"),
        ("probation_error_ratio = 1.5", "probation_error_ratio"),
        ("isa_limit = 'x86-64-v9'", "isa_limit"),
        ("server_url = 'ftp://x'", "server_url"),
        ("server_url = 'http://'", "server_url"),
        ("model = '../up'", "model"),
        ("serial = true", "serial"),
        ("threads = -1", "threads"),
        ("threads = 65", "threads"),
        ("threads = 2.7", "threads"),
        ("activation_tries = 2.5e400", "activation_tries"),
        ("= broken", "TOML"),
        ("agent = 3", "table"),
    ],
)
def test_it_refuses_a_setting_that_is_unknown_or_out_of_range(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        load(tmp_path, text)


def test_it_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml", environment={})
    config = AgentConfig(claim_file=str(tmp_path / "claim"))
    with pytest.raises(ConfigurationError, match="claim_file"):
        config.claim_text()
    (tmp_path / "claim").write_text("sfc_1_x\n")
    assert config.claim_text() == "sfc_1_x"
