"""Try an import in a process of its own: whatever the files do, the caller gets a typed error.

    python -m compiler.driver.vet  <  one JSON object: directories and limits
                                   >  one JSON line per directory

ONNX's checker and parser are C++: a file that finds a defect in them ends the process or never
returns. So strangers' files are imported here first. The child bounds its memory and its time
(`compiler.driver.bounds`); a child that dies, or is silent for much longer than the time limit, is
replaced, and its submission is refused. Nothing is kept but the verdicts.
"""

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TextIO

from compiler.driver.bounds import bounded
from compiler.errors import CompilerError, LimitError, MalformedModelError, UnsupportedOperatorError
from compiler.frontend.importer import import_pipeline
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits, exceeded
from compiler.passes.pipeline import lower_pipeline

ROOT: Final = Path(__file__).parents[2]
START_SECONDS: Final = 30.0
"""What starting the interpreter and loading the libraries may take."""
_CLASSES: Final = (LimitError, MalformedModelError, UnsupportedOperatorError, CompilerError)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one submission.

    Attributes:
        code: Of the error; empty if the submission lowers to programs.
        message: Of the error.
        hint: Of the error.
    """

    code: str = ""
    message: str = ""
    hint: str = ""

    def error(self) -> CompilerError | None:
        """Return the error, of the class that has the code."""
        if not self.code:
            return None
        kind = next((kind for kind in _CLASSES if kind.code == self.code), CompilerError)
        return kind(self.message, hint=self.hint)


def vet_submission(directory: Path, limits: ImportLimits = DEFAULT_LIMITS) -> None:
    """Import and lower one submission in a process of its own.

    Raises:
        UserModelError: As `import_pipeline` and `lower_pipeline` do; `LimitError` for time and
            memory too.
        MalformedModelError: The files end the process that reads them.
        CompilerError: A defect of the compiler; the message names the exception.
    """
    (verdict,) = vet_submissions([directory], limits)
    error = verdict.error()
    if error is not None:
        raise error


def vet_submissions(
    directories: Sequence[Path], limits: ImportLimits = DEFAULT_LIMITS
) -> list[Verdict]:
    """Return one verdict per directory; one process does as many as it survives."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(directories):
        verdicts.extend(_one_process(directories[len(verdicts) :], limits))
    return verdicts


def _one_process(directories: Sequence[Path], limits: ImportLimits) -> Iterator[Verdict]:
    job = {"directories": [str(path.resolve()) for path in directories], "limits": asdict(limits)}
    with subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,  # so that `select` sees every line that has not been read
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(job).encode())
        child.stdin.close()
        try:
            for _ in directories:
                ready, _, _ = select.select(
                    [child.stdout], [], [], 2 * limits.max_seconds + START_SECONDS
                )
                line = child.stdout.readline() if ready else b""
                if not line:
                    yield _ended(child, limits, answered=bool(ready))
                    return
                yield Verdict(**json.loads(line))
        finally:
            child.kill()


def _ended(child: subprocess.Popen[bytes], limits: ImportLimits, *, answered: bool) -> Verdict:
    """Say why a child gave no verdict: it does not return, or it has died."""
    if not answered:
        return _verdict(exceeded("max_seconds", "a library does not return", limits))
    status = child.wait()
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return _verdict(
        MalformedModelError(
            f"the files end the process that reads them ({how})",
            hint="the export is damaged, or it needs more memory than the limits allow",
        )
    )


def _verdict(error: CompilerError) -> Verdict:
    return Verdict(error.code, str(error), error.hint)


def _try(directory: Path, limits: ImportLimits) -> Verdict:
    try:
        with bounded(limits):
            lower_pipeline(import_pipeline(directory, limits))
    except CompilerError as error:
        return _verdict(error)
    except Exception as error:  # noqa: BLE001 - the verdict on the compiler itself
        return _verdict(CompilerError(f"{type(error).__name__}: {error}"))
    return Verdict()


def main(stdin: TextIO, stdout: TextIO) -> int:
    """Answer the job on `stdin`."""
    job = json.load(stdin)
    limits = ImportLimits(**job["limits"])
    for directory in job["directories"]:
        stdout.write(json.dumps(asdict(_try(Path(directory), limits))) + "\n")
        stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout))
