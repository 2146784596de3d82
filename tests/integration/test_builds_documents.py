"""Committed documents are fresh, and a web process stays light."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fresh_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import django; django.setup()\n" + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_a_fresh_openapi_document() -> None:
    fresh_python(
        "from django.core.management import call_command; call_command('openapi', '--check')"
    )


def test_a_web_process_never_loads_the_compiler() -> None:
    names = ["onnx", "xdsl", "compiler.driver", "compiler.frontend", "compiler.passes"]
    code = "import dashboards.conf.wsgi, dashboards.conf.urls, builds.tasks, sys\n"
    assert fresh_python(code + f"print([n for n in {names} if n in sys.modules])").strip() == "[]"
