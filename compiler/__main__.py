"""`python -m compiler`: see `compiler.driver.cli`, and here what a process needs around it."""

import io
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""As a shell reports a process that SIGTERM ended."""


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Leave as after Ctrl-C: children are killed, and temporary folders go."""
    raise SystemExit(TERMINATED)


def _prepare() -> None:
    """Take SIGTERM, and streams that are closed or know fewer characters than names have."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    try:
        _prepare()
        from compiler.driver.cli import main

        status = main()
    except KeyboardInterrupt:  # before `main` could take it
        status = 130
    except Exception:  # noqa: BLE001 - a defect of ours; Python's own status would blame the user
        traceback.print_exc()
        status = 3
    sys.exit(status)
