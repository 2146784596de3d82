"""Little routed models, and records and tables to steer them by."""

import numpy as np

from compiler.contract.operations import RouteOrder
from compiler.contract.steering import Residency, Steering, steered_experts
from compiler.kernels.program import ABSENT, ExpertAct, Module, NormKind, Op
from tests.factories.modules import ModuleBuilder

WIDTH, HIDDEN, EXPERTS, K, TOKENS = 24, 20, 7, 3, 8


def routed(order: RouteOrder, *, fused: bool = False, seed: int = 4, k: int = K) -> Module:
    """Return norm, router and experts as single operations or as one; index and gate are told.

    Sigmoid orders have corrections, and nine experts in three groups, two of which are chosen from.
    """
    b = ModuleBuilder(seed, TOKENS)
    sigmoid = order in (RouteOrder.SIGMOID_TOPK, RouteOrder.SIGMOID_TOPK_RENORM)
    experts = 9 if sigmoid else EXPERTS
    x, y = b.buffer(None, WIDTH, "f32"), b.buffer(None, WIDTH, "f32")
    index, gate = b.buffer(None, k, "i32"), b.buffer(None, k, "f32")
    norm = [b.vector(WIDTH, offset=1.0)]
    router = [b.weight(b.normal(experts, WIDTH)), b.vector(experts)]
    mixed = []
    for expert in range(experts):
        section = f"expert.L0.E{expert}"
        mixed += [b.w4(HIDDEN, WIDTH, section), b.w4(WIDTH, HIDDEN, section)]
    act = {"act": ExpertAct.RELU}
    if fused:
        weights = [norm[0], ABSENT, *router, *mixed]
        b.call(
            Op.MOE_LAYER, [x], [y, index, gate], weights, k=k, order=order, **act, kind=0, eps=1e-5
        )
    else:
        h = b.call(Op.NORM, [x], [b.buffer(None, WIDTH, "f32")], norm, kind=NormKind.RMS, eps=1e-5)
        extra: dict[str, float] = {"jitter": 0.4} if order == RouteOrder.SPARSEMIXER else {}
        if sigmoid:
            router.append(b.vector(experts))
            extra = {"groups": 3, "top_groups": 2, "group_take": 2, "scale": 1.5}
        b.call(Op.ROUTE, [h], [index, gate], router, k=k, order=order, **extra)
        b.call(Op.EXPERTS, [h, index, gate], [y], mixed, **act)
    b.program("run", {"x": x}, {"y": y, "index": index, "gate": gate})
    return b.module()


def experts_of(module: Module) -> tuple[int, ...]:
    """Return the first weights of the experts of the only router of `run`."""
    rows = [np.atleast_2d(weight.array).shape[0] for weight in module.weights]
    (firsts,) = steered_experts(module.programs[0].calls, rows).values()
    return firsts


def residency(module: Module, present: set[int]) -> Residency:
    """Return a table in which only some experts of the only router are in memory."""
    table = Residency(len(module.weights))
    for expert, first in enumerate(experts_of(module)):
        table[first] = expert in present
    return table


def random_record(weights: int, random: np.random.Generator) -> Steering:
    """Return a record of any kind for a plan of so many weights."""
    bias = random.standard_normal(weights).astype(np.float32) if random.random() < 0.5 else ()
    return Steering(
        pull=float(np.float32(random.choice([0.0, 0.3, 2.0]))),
        protect=int(random.integers(0, 3)),
        margin=float(np.float32(random.choice([0.0, 0.2, 0.5, 1.0]))),
        max_k=int(random.integers(0, 4)),
        modality=float(np.float32(random.uniform(-1, 1))),
        bias=tuple(float(x) for x in bias),
        may_load=bool(random.random() < 0.5),
    )


def random_steering(module: Module, seed: int) -> tuple[Steering, Residency | None]:
    """Return a record and a table of any kind, or no table."""
    random = np.random.default_rng(seed)
    steering = random_record(len(module.weights), random)
    firsts = experts_of(module)
    present = {at for at in range(len(firsts)) if random.random() < 0.4}
    return steering, residency(module, present) if random.random() < 0.8 else None
