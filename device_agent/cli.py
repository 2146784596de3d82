"""Command line of the device agent: enrol, rotate-key, run, status, ask, infer ..."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from compiler.contract.errors import ContractError
from compiler.contract.native_library import MAX_THREADS
from compiler.contract.rule_language import comparisons
from compiler.contract.trace_files import TRACE_FORMATS
from device_agent.agent import Agent
from device_agent.asking import ask, questions
from device_agent.config import ISA_LEVELS, AgentConfig, load_config
from device_agent.errors import AgentError, ConfigurationError
from device_agent.farm import farm_configs, run_agents, stop_on_signal
from device_agent.identity import DeviceKey
from device_agent.inferring import Inference, infer
from device_agent.ports import Ports, probe_this_machine, read_rules
from device_agent.probe.hardware import HardwareProbe
from device_agent.runtime.sampling import MAX_TEMPERATURE
from device_agent.status import read_status
from device_agent.storage.disk import Disk
from device_agent.tracing import trace_answers
from device_agent.ui import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    failure,
    result,
    set_up_log,
)

_LEAST_S: Final = sys.float_info.min
_SETTINGS: Final = (
    ("server_url", "where the platform is"),
    ("state_dir", "folder of this agent"),
    ("claim", "claim token, for enrolment"),
    ("claim_file", "file with the claim token"),
    ("serial", "serial number"),
    ("name", "name shown to people"),
    ("model", "model that the device runs"),
    ("device_class", "declared class: phone, pc, car ..."),
    ("evaluation", "evaluation set whose questions are asked"),
    ("questions_per_s", "how many questions per second"),
    ("poll_s", "seconds between polls; 0 = as the server says"),
    ("probation_s", "seconds that a new bundle is on probation"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    options = _parser().parse_args(arguments)
    set_up_log(verbose=options.verbose)
    command: Callable[[AgentConfig, argparse.Namespace], int] = options.command
    try:
        overrides = {name: getattr(options, name, None) for name, _ in _SETTINGS}
        overrides["isa_limit"] = getattr(options, "isa_limit", None)
        return command(load_config(options.config, overrides), options)
    except (AgentError, ContractError) as error:
        return failure(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # who read the results has left, and needs no more of them
        return EXIT_FAILED


def _enrol(config: AgentConfig, options: argparse.Namespace) -> int:
    agent = Agent(config)
    try:
        enrolment = agent.enrol(accept_state_loss=options.accept_state_loss)
    finally:
        agent.close()
    result(f"{enrolment.device_id} {enrolment.state}")
    return EXIT_OK


def _rotate_key(config: AgentConfig, _options: argparse.Namespace) -> int:
    agent = Agent(config)
    try:
        result(agent.rotate_key())
    finally:
        agent.close()
    return EXIT_OK


def _thumbprint(config: AgentConfig, _options: argparse.Namespace) -> int:
    key = DeviceKey.load_or_make(Disk(), config.state_dir / "identity")
    result(key.thumbprint)
    return EXIT_OK


_KEY_COMMANDS: Final = (
    ("thumbprint", _thumbprint, "print the thumbprint of the device key, made if needed"),
    ("rotate-key", _rotate_key, "replace the device key; the device stays the same"),
)


def _run(config: AgentConfig, _options: argparse.Namespace) -> int:
    with stop_on_signal() as stop:
        run_agents([config], Ports(), stop)
    return EXIT_OK


def _farm(config: AgentConfig, options: argparse.Namespace) -> int:
    limits = options.isa_limits.split(",")
    with stop_on_signal() as stop:
        run_agents(farm_configs(config, options.count, limits), Ports(), stop)
    return EXIT_OK


def _status(config: AgentConfig, options: argparse.Namespace) -> int:
    status = read_status(config)
    result(status.to_json() if options.json else status.to_text())
    return EXIT_OK


def _probe(config: AgentConfig, options: argparse.Namespace) -> int:
    found = HardwareProbe(lambda: probe_this_machine(config), config.state_dir).run()
    result(json.dumps(found.to_json(), indent=2) if options.json else found.to_text())
    return EXIT_OK


def _ask(config: AgentConfig, options: argparse.Namespace) -> int:
    for line in ask(config, options.image, options.card, options.template, _words(options)):
        result(line)
    return EXIT_OK


def _words(options: argparse.Namespace) -> tuple[str, ...]:
    if options.prompt is not None and options.words:
        raise ConfigurationError(
            "words are given twice", hint="either --prompt, or words as they are"
        )
    return tuple(options.words if options.prompt is None else options.prompt.split())


def _trace(config: AgentConfig, options: argparse.Namespace) -> int:
    asked = questions(config, options.image, options.card, options.template, _words(options))
    for line in trace_answers(config, asked, options.out, options.format):
        result(line)
    return EXIT_OK


def _infer(config: AgentConfig, options: argparse.Namespace) -> int:
    return infer(
        config,
        Inference(
            bundle=options.bundle,
            prompt=options.prompt,
            template=options.template,
            image=options.image,
            max_tokens=options.max_tokens,
            deadline=options.deadline,
            temperature=options.temperature,
            seed=options.seed,
            threads=options.threads,
            is_streamed=options.stream,
            is_json=options.json,
        ),
    )


def _check_rules(_config: AgentConfig, options: argparse.Namespace) -> int:
    rules = read_rules(options.file)
    for rule in rules:
        signals = sorted({one.name for one in comparisons(rule.when)})
        rung = rule.rung.name.lower()
        result(f"{rule.name}: {rung}, priority {rule.priority}, looks at {', '.join(signals)}")
        if not rule.rung.in_bundles:
            result(f"{rule.name}: no bundle can have {rung}: devices go to what theirs has instead")
    result(f"{options.file.name}: rules: {len(rules)}, no fault found")
    return EXIT_OK


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="file for the trace")
    parser.add_argument(
        "--format",
        choices=tuple(TRACE_FORMATS),
        default="json",
        help="json also opens in chrome://tracing; perfetto is smaller (default json)",
    )
    _add_question(parser)


def _add_infer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", nargs="?", type=Path, help="bundle directory; without it, what is installed"
    )
    parser.add_argument("--prompt", default="", help="words, with spaces between them")
    parser.add_argument("--template", help="prompt around the words; '' = none")
    parser.add_argument("--image", type=Path, help="picture: .npy (uint8), .pgm or .ppm")
    tokens, seconds = _checked(int, "at least 1", 1), _checked(float, "above 0", _LEAST_S)
    parser.add_argument("--max-tokens", type=tokens, help="tokens at most; else as the bundle says")
    parser.add_argument("--deadline", type=seconds, metavar="S", help="seconds; then what there is")
    heat = _checked(float, f"0, greedy, to {MAX_TEMPERATURE:g}", 0, MAX_TEMPERATURE)
    parser.add_argument("--temperature", type=heat, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the draws above temperature 0")
    threads = _checked(int, f"0, as many as help, to {MAX_THREADS}", 0, MAX_THREADS)
    parser.add_argument("--threads", type=threads, help="threads of the answer; 0 = measure")
    parser.add_argument("--stream", action="store_true", help="print each token as it is made")
    parser.add_argument("--json", action="store_true", help="for machines; with --stream, lines")


def _checked(
    kind: type[int] | type[float], told: str, least: float, most: float = sys.float_info.max
) -> Callable[[str], float]:
    """Return the type of an option: a number in a range, which `told` names."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: {told}")
        return value

    return number


def _add_question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, help="picture: .npy (uint8) or .pgm")
    parser.add_argument("--card", type=int, help="ask all questions of a card of --evaluation")
    parser.add_argument(
        "--prompt", help="words, with spaces between them; or as they are, behind the options"
    )
    parser.add_argument("--template", help="prompt around the words; default: question")
    parser.add_argument("words", nargs="*", help="words of the question")


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, help="TOML file")
    common.add_argument("--verbose", action="store_true", help="log more, to stderr")
    for name, help_text in _SETTINGS:
        common.add_argument(f"--{name.replace('_', '-')}", dest=name, help=help_text)
    common.add_argument(
        "--isa-limit", choices=ISA_LEVELS[1:], help="report nothing above this ISA level"
    )
    parser = argparse.ArgumentParser(
        prog="python -m device_agent",
        description="Device agent of Sparsefleet. Settings: TOML, SPARSEFLEET_AGENT_*, options.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    enrol = commands.add_parser("enrol", parents=[common], help="introduce this device once")
    enrol.add_argument("--accept-state-loss", action="store_true", help="begin with new floors")
    enrol.set_defaults(command=_enrol)
    for name, command, told in _KEY_COMMANDS:
        commands.add_parser(name, parents=[common], help=told).set_defaults(command=command)
    run = commands.add_parser("run", parents=[common], help="run until stopped; enrols if needed")
    run.set_defaults(command=_run)
    status = commands.add_parser("status", parents=[common], help="what this device runs and does")
    status.add_argument("--json", action="store_true", help="for machines")
    status.set_defaults(command=_status)
    question = commands.add_parser("ask", parents=[common], help="ask the running bundle")
    _add_question(question)
    question.set_defaults(command=_ask)
    inference = commands.add_parser(
        "infer", parents=[common], help="answer a prompt with a bundle, token by token"
    )
    _add_infer(inference)
    inference.set_defaults(command=_infer)
    rules = commands.add_parser("check-rules", parents=[common], help="check a file of rules")
    rules.add_argument("file", type=Path, help="degrade rules, sparsefleet.degrade/1")
    rules.set_defaults(command=_check_rules)
    trace = commands.add_parser(
        "trace", parents=[common], help="ask, and write what ran when, for ui.perfetto.dev"
    )
    _add_trace(trace)
    trace.set_defaults(command=_trace)
    probed = commands.add_parser("probe", parents=[common], help="what this machine can do")
    probed.add_argument("--json", action="store_true", help="for machines")
    probed.set_defaults(command=_probe)
    farm = commands.add_parser("farm", parents=[common], help="several agents in one process")
    farm.add_argument("--count", type=int, required=True, help="how many")
    farm.add_argument(
        "--isa-limits", default="", help="ISA levels, comma separated, dealt out in turn"
    )
    farm.set_defaults(command=_farm)
    return parser


if __name__ == "__main__":
    sys.exit(main())
