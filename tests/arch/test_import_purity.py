"""What loads is tested, not what the text says: a fresh interpreter is asked what came along."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numpy", "onnx", "jinja2", "django", "celery", "xdsl", "zstandard", "tuf")


def modules_after(statement: str) -> set[str]:
    names = "sorted({m.split('.')[0] for m in sys.modules})"
    code = f"import sys, json\n{statement}\nprint(json.dumps({names}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def contract_modules() -> list[str]:
    folder = ROOT / "compiler" / "contract"
    return sorted(
        f"compiler.contract.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"
    )


@pytest.mark.parametrize("module", contract_modules())
def test_it_loads_a_contract_module_without_heavy_packages(module: str) -> None:
    assert modules_after(f"import {module}").isdisjoint(HEAVY)


def test_it_loads_the_agent_without_the_platform_or_the_compiler() -> None:
    loaded = modules_after("import device_agent.cli")
    assert loaded.isdisjoint(
        {"django", "celery", "onnx", "xdsl", "jinja2", "builds", "fleet", "dashboards"}
    )


def test_it_loads_the_web_process_without_the_compiler() -> None:
    loaded = modules_after(
        "import os; os.environ['DJANGO_SETTINGS_MODULE']='dashboards.conf.settings'\n"
        "import dashboards.conf.wsgi"
    )
    assert loaded.isdisjoint({"onnx", "xdsl", "ziglang"})


def test_it_finds_the_planted_breach() -> None:
    assert "numpy" in modules_after("import compiler.contract.canonical, numpy")
