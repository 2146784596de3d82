"""Run the self-test of a bundle with its OpenCL kernels, in a process of its own.

    python -m compiler.driver.opencl_process DIRECTORY

The directory holds one file per section, named by component; `kernels` is OpenCL C. Prints the
report as one JSON line. Exit status as `compiler.contract.selftest_process`, and 3 where no OpenCL
device gives our bits. A driver that crashes ends this process only.
"""

import json
import sys
from pathlib import Path

from compiler.contract.errors import ContractError
from compiler.contract.selftest import run_selftest
from compiler.contract.selftest_process import BROKEN, FAILED, NOT_WEIGHTS, PASSED
from compiler.driver.native_check import OPENCL_ABSENT
from compiler.emitters.opencl.device import Device, NoDeviceError, OpenClError
from compiler.emitters.opencl.runner import OpenClPlan


def main(directory: Path) -> int:
    """Load the bundle in `directory`, run its self-test, print the report."""
    weights = {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name not in NOT_WEIGHTS
    }
    try:
        device = Device((directory / "kernels").read_text(encoding="utf-8"))
        plan = OpenClPlan(device, (directory / "plan").read_bytes(), weights)
        report = run_selftest(plan, (directory / "selftest").read_bytes())
    except NoDeviceError as error:
        sys.stderr.write(f"{error}\n")
        return OPENCL_ABSENT
    except (ContractError, OpenClError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BROKEN
    sys.stdout.write(json.dumps({"device": device.name, **report.to_json()}) + "\n")
    return PASSED if report.passed else FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
