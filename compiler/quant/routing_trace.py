"""Routing traces of a calibration record, for replays; see `compiler.analysis.routing_replay`."""

from compiler.analysis.routing_replay import LayerTrace
from compiler.kernels.program import ABSENT, Module
from compiler.quant.record import CalibrationRecord
from compiler.quant.router_bits import logits


def routing_trace(module: Module, record: CalibrationRecord) -> tuple[LayerTrace, ...]:
    """Return what each router computed, by layer; nothing if one does not choose by its logits.

    Args:
        module: The module that was recorded, its routers rounded or not.
        record: What calibration saw; rows that it thinned out are missing.
    """
    if not all(router.by_logits for router in record.routers):
        return ()
    return tuple(
        LayerTrace(
            logits(
                module.weights[router.weight].array,
                None if router.bias == ABSENT else module.weights[router.bias].array,
                router.inputs,
            ),
            router.run,
            router.index.shape[1],
        )
        for router in record.routers
    )
