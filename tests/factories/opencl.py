"""An OpenCL device with every kernel of ours; what it built is kept in `var/test-cache`."""

import os
from functools import cache

from compiler.emitters.backends import emitter_for
from compiler.emitters.opencl.device import Device
from compiler.emitters.opencl.runner import OpenClPlan
from compiler.hardware.targets import OPENCL
from tests.factories.kernels import CACHE, Case

EMITTER = emitter_for(OPENCL)
POCL_CACHE = CACHE.parent / "pocl"


@cache
def device() -> Device:
    """Return the device; opened on first use, because opening it loads its compiler."""
    POCL_CACHE.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("POCL_CACHE_DIR", str(POCL_CACHE))
    return Device(EMITTER.emit(EMITTER.capabilities(), OPENCL))


def load(case: Case) -> OpenClPlan:
    """Return a module's plan on the device."""
    return OpenClPlan(device(), case.emitted.plan_bytes, case.emitted.sections)
