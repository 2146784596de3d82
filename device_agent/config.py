"""Configuration: defaults, then a TOML file, then `SPARSEFLEET_AGENT_*`; the only reader of either.

Every limit is a named field with its unit. Unknown names are refused, so that a typing error does
not silently become a default.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from compiler.contract.manifest import NAME_PATTERN
from compiler.contract.protocol import Network
from device_agent.errors import ConfigurationError
from device_agent.runtime.affinity import AUTO, require_cpus
from device_agent.runtime.energy import configured
from device_agent.runtime.threads import require_threads

ENVIRONMENT_PREFIX: Final = "SPARSEFLEET_AGENT_"
STEERING: Final = ("auto", "off")
SWITCH: Final = ("off", "on")
ISA_LEVELS: Final = ("", "x86-64-v1", "x86-64-v2", "x86-64-v3")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Everything one agent is told. Seconds, bytes and ratios as the names say.

    Attributes:
        server_url: Where the platform is, e.g. `https://fleet.example`.
        state_dir: Folder that belongs to this agent alone.
        claim: Claim token `sfc_<id>_<secret>`, needed once, for enrolment.
        claim_file: Where to read the claim from instead.
        serial: Serial number of the device; with the key it is the identity.
        name: What people call it; the serial when empty.
        model: Model that the device runs.
        device_class: Declared class: `phone`, `pc`, `car` ...
        network: What is known of the network that updates come over: `metered`, `unmetered` or
            `unknown`, which is taken as not metered. Rollouts may make metered devices wait.
        isa_limit: Highest ISA level that the probe may report; empty for all there is.
        image_root, director_root: Files with pinned roots of trust; when given, enrolment must
            hand out exactly these.
        ca_file: Certificates to trust for https, instead of the system's.
        poll_s: Time between polls; 0 = as the server says.
        evaluation: Evaluation set (`sparsefleet.cards/1`) whose questions the device asks itself.
        questions_per_s: How many of them; 0 = none.
        telemetry_s: Time between telemetry batches.
        probation_s: How long a new bundle runs before it is committed.
        probation_answers: Answers that probation needs at least when questions are asked.
        probation_error_ratio: Share of answers with an error or a timeout that ends probation.
        probation_cutoff_ratio: Share of cut-off answers that ends it; high, because telling a
            worse model from a broken one is the fleet's business.
        probation_deadline_s: Probation without enough answers ends as a failure after this.
        answer_timeout_s: An answer that takes longer counts as a failure.
        self_test_timeout_s: The child that runs the self-test is killed after this.
        denied_s: A bundle that failed here is not tried again for so long, twice as long after each
            further failure, unless the server orders a retry; 0 = it may be tried at once.
        activation_tries: Starts that a bundle on probation is granted.
        max_store_bytes: Most bytes of sections kept on the device.
        reserve_bytes: Free space that is never used.
        patch_in_place: `on` = where space is too short for the new sections beside the old, the old
            ones are patched: the bundle before the running one is dropped, and the running one
            cannot be loaded again until the update has ended. `off` = such an update fails.
        patch_timeout_s: The process that applies a delta is killed after this.
        patch_memory_bytes: What it may allocate.
        connect_timeout_s, read_timeout_s: Limits of one network operation.
        request_deadline_s: Limit of one small request, answer included.
        download_deadline_s: Limit of one section.
        update_deadline_s: Limit of verifying and downloading one update, retries included.
        min_rate_bytes_s: A download slower than this for `min_rate_window_s` is given up.
        retry_first_s, retry_most_s: Backoff between tries, before jitter.
        max_spool_batches: Telemetry batches kept while the server is away; the oldest go first.
        threads: Threads that one answer may use; 0 = as many as help, measured when a bundle
            starts, at most one per core.
        cpus: Cores on which lent threads run: `auto` = the big ones where the system tells sizes,
            `off` = anywhere, or a list such as `4-7`.
        max_weight_bytes: Most bytes of weights in memory; experts beyond them come as they are
            needed. 0 = all weights. A bundle that cannot run in as few is refused.
        degrade_rules: File of rules `sparsefleet.degrade/1`: when this device does less. Empty =
            `device_agent.runtime.degrade_keeper.DEFAULT_RULES`.
        rules_s: Time between two questions for degrade rules of the server, which win over
            `degrade_rules`; 0 = never ask.
        tdp_w: Power budget of this device, watts; 0 = unknown. Shown beside what answers take.
        energy_model: Idle watts, joules per byte of weights and joules per operation, with commas
            between, as `status` shows them (`energy.fitted`) on a like device that has a counter.
            Empty = unverified figures.
        steering: `auto` = routers go by what lies in memory and take fewer experts where they are
            sure, by the bundle's coefficients; `off` = they choose as the model says.
    """

    server_url: str = "http://127.0.0.1:8000"
    state_dir: Path = Path("var/agent")
    claim: str = ""
    claim_file: str = ""
    serial: str = ""
    name: str = ""
    model: str = ""
    device_class: str = "pc"
    network: str = Network.UNKNOWN.value
    isa_limit: str = ""
    image_root: str = ""
    director_root: str = ""
    ca_file: str = ""
    poll_s: float = 0.0
    evaluation: str = ""
    questions_per_s: float = 0.0
    telemetry_s: float = 10.0
    probation_s: float = 30.0
    probation_answers: int = 3
    probation_error_ratio: float = 0.2
    probation_cutoff_ratio: float = 0.9
    probation_deadline_s: float = 600.0
    answer_timeout_s: float = 10.0
    self_test_timeout_s: float = 60.0
    denied_s: float = 604_800.0
    activation_tries: int = 3
    max_store_bytes: int = 8 << 30
    reserve_bytes: int = 16 << 20
    patch_in_place: str = SWITCH[0]
    patch_timeout_s: float = 600.0
    patch_memory_bytes: int = 128 << 20
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    request_deadline_s: float = 30.0
    download_deadline_s: float = 1_800.0
    update_deadline_s: float = 7_200.0
    min_rate_bytes_s: int = 1_024
    min_rate_window_s: float = 30.0
    retry_first_s: float = 0.5
    retry_most_s: float = 60.0
    max_spool_batches: int = 1_000
    threads: int = 0
    cpus: str = AUTO
    max_weight_bytes: int = 0
    degrade_rules: str = ""
    tdp_w: float = 0.0
    energy_model: str = ""
    rules_s: float = 600.0
    steering: str = STEERING[0]

    def __post_init__(self) -> None:
        _require_valid(self)

    @property
    def display_name(self) -> str:
        """Return the name shown to people."""
        return self.name or self.serial

    def claim_text(self) -> str:
        """Return the claim token, from the setting or its file.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        if not self.claim_file:
            return self.claim
        return _read_text(Path(self.claim_file), "claim_file").strip()


def load_config(
    path: Path | None,
    overrides: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AgentConfig:
    """Read the configuration.

    Args:
        path: TOML file, or None for none.
        overrides: Command line; None values are skipped. Wins over everything.
        environment: Variables; those of the process when None.

    Raises:
        ConfigurationError: A file cannot be read, a name is unknown, or a value does not fit.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_read_toml(path))
    values.update(_from_environment(os.environ if environment is None else environment))
    values.update({key: value for key, value in (overrides or {}).items() if value is not None})
    known = {item.name: item.type for item in fields(AgentConfig)}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ConfigurationError(
            f"unknown setting {unknown[0]!r}", hint="known: " + ", ".join(sorted(known))
        )
    return AgentConfig(**{name: _converted(name, known[name], values[name]) for name in values})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(_read_text(path, "configuration"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path.name} is not TOML: {error}") from error
    agent = document.get("agent", document)
    if not isinstance(agent, dict):
        raise ConfigurationError(f"{path.name}: [agent] must be a table")
    return agent


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{what}: cannot read {path}: {reason}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def _converted(name: str, kind: object, value: object) -> Any:  # noqa: ANN401 -- by the field
    converters = {str: str, int: int, float: float, Path: Path}
    convert = converters[kind]  # type: ignore[index]
    acceptable = (int, float, str) if convert in (int, float) else (str, Path)
    is_cut = convert is int and isinstance(value, float) and not value.is_integer()
    if isinstance(value, bool) or not isinstance(value, acceptable) or is_cut:
        raise ConfigurationError(f"{name}: {value!r} is not a {convert.__name__}")
    try:
        return convert(value)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{name}: {value!r} is not a {convert.__name__}") from error


def _require_valid(config: AgentConfig) -> None:
    parts = urlsplit(config.server_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigurationError(
            f"server_url {config.server_url!r} is no http(s) address",
            hint="for example https://fleet.example",
        )
    _require_choices(config)
    require_cpus(config.cpus)
    require_threads(config.threads)
    _require_energy_model(config)
    if config.model and NAME_PATTERN.fullmatch(config.model) is None:
        raise ConfigurationError(f"model {config.model!r} must match {NAME_PATTERN.pattern}")
    for name in _NOT_NEGATIVE:
        if not 0 <= getattr(config, name) < float("inf"):
            raise ConfigurationError(f"{name} must not be negative")
    for name in _POSITIVE:
        if not 0 < getattr(config, name) < float("inf"):
            raise ConfigurationError(f"{name} must be above 0")
    for name in ("probation_error_ratio", "probation_cutoff_ratio"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigurationError(f"{name} must be in (0, 1]")


def _require_choices(config: AgentConfig) -> None:
    for name, allowed in _CHOICES.items():
        if getattr(config, name) not in allowed:
            shown = ", ".join(filter(None, allowed))
            raise ConfigurationError(f"{name} {getattr(config, name)!r}", hint=f"one of: {shown}")


def _require_energy_model(config: AgentConfig) -> None:
    try:
        if config.energy_model:
            configured(config.energy_model)
    except ValueError as error:
        raise ConfigurationError(f"energy_model: {error}") from error


_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "isa_limit": ISA_LEVELS,
    "network": tuple(item.value for item in Network),
    "steering": STEERING,
    "patch_in_place": SWITCH,
}
_NOT_NEGATIVE: Final = (
    "poll_s",
    "questions_per_s",
    "probation_s",
    "probation_answers",
    "denied_s",
    "reserve_bytes",
    "max_weight_bytes",
    "min_rate_bytes_s",
    "tdp_w",
    "rules_s",
)
_POSITIVE: Final = (
    "telemetry_s",
    "probation_deadline_s",
    "answer_timeout_s",
    "self_test_timeout_s",
    "activation_tries",
    "max_store_bytes",
    "patch_timeout_s",
    "patch_memory_bytes",
    "connect_timeout_s",
    "read_timeout_s",
    "request_deadline_s",
    "download_deadline_s",
    "update_deadline_s",
    "min_rate_window_s",
    "retry_first_s",
    "retry_most_s",
    "max_spool_batches",
)
