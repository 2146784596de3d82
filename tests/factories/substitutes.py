"""A small routed model with everything that may stand in for its experts."""

from dataclasses import replace

import numpy as np

from compiler.contract.substitutes import Substitute, Substitutes, Trial
from compiler.driver.substitute_fit import fitted_layers
from compiler.emitters.schedule import obey, schedule_ops
from compiler.emitters.substitutes import (
    RoutedLayer,
    Substituted,
    routed_layers,
    with_full,
    with_narrow,
    with_shared,
)
from compiler.kernels.program import Module
from compiler.quant.module import pack_module, pack_weight
from compiler.quant.narrow_dense import NarrowLayer, RoutedRows, gate_biases
from tests.factories.kernels import Case

FOUND = Substitutes(100, 90, 250_000, tuple(Trial(kind, 2, 0) for kind in Substitute))
ROWS = 64


def random_rows(module: Module, layer: RoutedLayer, seed: int = 1, rows: int = ROWS) -> RoutedRows:
    """Return rows of noise that a router might have sent anywhere."""
    random, k = np.random.default_rng(seed), int(layer.route.params["k"])
    width = module.weights[layer.experts[0][0]].array.shape[1]
    order = np.argsort(random.random((rows, len(layer.experts))), axis=1)
    gate = random.random((rows, k))
    return RoutedRows(
        random.standard_normal((rows, width)).astype(np.float32),
        order[:, :k],
        gate / gate.sum(axis=1, keepdims=True),
        np.arange(rows) % 3 == 0,
    )


def narrow_layers(module: Module) -> dict[int, NarrowLayer]:
    """Return a narrow layer for each routed one."""
    layers = routed_layers(module)
    rows = {number: random_rows(module, layer) for number, layer in layers.items()}
    return fitted_layers(module, layers, rows, pack_weight)


def substituted(module: Module, *kinds: Substitute) -> Substituted:
    """Return a module with the variants of some substitutes, all if none is named."""
    layers = routed_layers(module)
    makers = {
        Substitute.SHARED_ONLY: with_shared,
        Substitute.NARROW_DENSE: lambda some: with_narrow(some, narrow_layers(module)),
        Substitute.FULL_DENSE: lambda some: with_full(
            some,
            {
                number: gate_biases(random_rows(module, layer), len(layer.experts))
                for number, layer in layers.items()
            },
        ),
    }
    found = Substituted(module)
    for kind in kinds or tuple(Substitute):
        found = found.then(makers[kind](found.module))
    return found


def case_of(found: Substituted) -> Case:
    """Return it packed and emitted, its schedule on the tape."""
    module = obey(found.module, schedule_ops(found.module))
    packed = pack_module(module)
    return Case.of(module, replace(packed, packed={**packed.packed, **found.packed}))
