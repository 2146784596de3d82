"""One target under atheris; `tests.fuzz` starts it with a name and libFuzzer's options."""

import sys

import atheris

with atheris.instrument_imports(
    include=["compiler", "device_agent", "builds", "tests.fuzz.targets"]
):
    from tests.fuzz.targets import TARGETS


def main(words: list[str]) -> None:
    """Fuzz until the time is over, or a fault ends the process."""
    target = TARGETS[words[1]]
    atheris.Setup([words[0], *words[2:]], target.outcome)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
