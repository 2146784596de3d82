"""Write the golden files anew: `python -m tests.golden.passes.rewrite`. Review the diff."""

import tempfile
from pathlib import Path

from tests.golden.passes.cases import CASES, golden_path, golden_text


def main() -> None:
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            golden_path(name).write_text(golden_text(name, Path(folder)))


if __name__ == "__main__":
    main()
