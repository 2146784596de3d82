"""Group experts that the same program runs use, and say what grouping is worth.

    affinity[a, b] = runs that use both / runs that use either        (all layers together)

Groups come from average-linkage clustering of the affinities with a cap on the members; the same
record gives the same groups. `simulate_loads` counts what a least-recently-used cache of whole
groups would load: the figure that grouping is for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.expert_groups import ExpertGroups
from compiler.kernels.program import Module
from compiler.quant.record import CalibrationRecord

GROUP_SIZE: Final = 4
MOST_TOGETHER: Final = 1024
"""Experts that are clustered over all layers; larger models are clustered layer by layer."""
CACHE_SHARE: Final = 0.5
RANDOM_TRIALS: Final = 16
TRAINING_SHARE: Final = 2 / 3

Steps = tuple[tuple[int, ...], ...]
"""Per run, the numbers of the experts it uses, counted over all layers, ascending by layer."""


@dataclass(frozen=True, slots=True)
class GroupingReport:
    """Experts loaded by a cache of groups over runs that the groups were not made from.

    Attributes:
        runs: Program runs simulated.
        group_size: Most members of a group.
        cache_experts: Experts that the cache holds.
        requests: Group loads, one storage request each.
        grouped: Experts loaded with clustered groups.
        random: The same with random groups of that size, mean of `RANDOM_TRIALS`.
        single: The same without groups.
        single_requests: Requests without groups.
    """

    runs: int
    group_size: int
    cache_experts: int
    requests: int
    grouped: int
    random: float
    single: int
    single_requests: int


def expert_steps(module: Module, record: CalibrationRecord) -> tuple[tuple[int, ...], Steps]:
    """Return the number of experts per layer, and the experts that each run used."""
    sizes = tuple(len(module.weights[router.weight].array) for router in record.routers)
    used: dict[int, list[int]] = {}
    first = 0
    for size, router in zip(sizes, record.routers, strict=True):
        pairs = np.unique(
            np.stack([np.repeat(router.run, router.index.shape[1]), router.index.ravel()]), axis=1
        )
        for run, expert in pairs.T.tolist():
            used.setdefault(int(run), []).append(first + int(expert))
        first += size
    return sizes, tuple(tuple(used[run]) for run in sorted(used))


def group_experts(sizes: Sequence[int], steps: Steps, most: int = GROUP_SIZE) -> ExpertGroups:
    """Return groups of at most `most` experts that are used together.

    Args:
        sizes: Experts per layer, at least one layer.
        steps: What each run used.
        most: Cap on the members of a group.
    """
    total = sum(sizes)
    counts, together = _counts(total, steps)
    either = counts[:, None] + counts[None, :] - together
    affinity = together / np.maximum(either, 1)
    if total <= MOST_TOGETHER:
        clusters = _cluster(affinity, list(range(total)), most)
    else:
        clusters = []
        first = 0
        for size in sizes:
            clusters += _cluster(affinity, list(range(first, first + size)), most)
            first += size
    clusters.sort(key=lambda members: (-counts[members].sum(), members))
    return _numbered(sizes, clusters)


def grouping_report(sizes: Sequence[int], steps: Steps, most: int = GROUP_SIZE) -> GroupingReport:
    """Cluster on the first runs, and simulate a cache over the others."""
    middle = int(len(steps) * TRAINING_SHARE)
    unseen = steps[middle:]
    total = sum(sizes)
    capacity = max(most, int(total * CACHE_SHARE))
    grouped, requests = simulate_loads(
        _flat(group_experts(sizes, steps[:middle], most)), unseen, capacity
    )
    single, single_requests = simulate_loads(list(range(total)), unseen, capacity)
    random = np.random.default_rng(0)
    shuffled = [
        simulate_loads((random.permutation(total) // most).tolist(), unseen, capacity)[0]
        for _ in range(RANDOM_TRIALS)
    ]
    return GroupingReport(
        runs=len(unseen),
        group_size=most,
        cache_experts=capacity,
        requests=requests,
        grouped=grouped,
        random=float(np.mean(shuffled)),
        single=single,
        single_requests=single_requests,
    )


def simulate_loads(groups: Sequence[int], steps: Steps, capacity: int) -> tuple[int, int]:
    """Return experts loaded and requests made by a least-recently-used cache of whole groups.

    Args:
        groups: Group of each expert.
        steps: What each run uses, in order.
        capacity: Experts that the cache holds; the group in use stays whatever its size.
    """
    sizes: dict[int, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    cached: dict[int, None] = {}
    held = loaded = requests = 0
    for step in steps:
        for group in dict.fromkeys(groups[expert] for expert in step):
            if group in cached:
                del cached[group]
            else:
                requests, loaded, held = requests + 1, loaded + sizes[group], held + sizes[group]
            cached[group] = None
            while held > capacity and len(cached) > 1:
                oldest = next(iter(cached))
                del cached[oldest]
                held -= sizes[oldest]
    return loaded, requests


def _counts(total: int, steps: Steps) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return runs per expert, and per pair of experts (0 on the diagonal)."""
    used = np.zeros((len(steps), total), np.int64)
    for run, experts in enumerate(steps):
        used[run, list(experts)] = 1
    together = (used.astype(np.float32).T @ used.astype(np.float32)).astype(np.int64)
    counts = together.diagonal().copy()
    np.fill_diagonal(together, 0)
    return counts, together


def _cluster(affinity: NDArray[np.float64], members: list[int], most: int) -> list[list[int]]:
    """Merge the two clusters of greatest mean affinity while some pair fits the cap."""
    clusters: Mapping[int, list[int]] = {at: [member] for at, member in enumerate(members)}
    linked = affinity[np.ix_(members, members)].copy()
    sizes = np.ones(len(members))
    while True:
        fits = (sizes[:, None] + sizes[None, :] <= most) & (sizes > 0)[:, None] & (sizes > 0)
        np.fill_diagonal(fits, val=False)
        if not fits.any():
            return [sorted(cluster) for at, cluster in clusters.items() if sizes[at]]
        mean = np.where(fits, linked / np.maximum(np.outer(sizes, sizes), 1), -1.0)
        keep, gone = (int(at) for at in np.unravel_index(int(mean.argmax()), mean.shape))
        clusters[keep].extend(clusters[gone])
        linked[keep] += linked[gone]
        linked[:, keep] += linked[:, gone]
        sizes[keep] += sizes[gone]
        sizes[gone] = 0


def _numbered(sizes: Sequence[int], clusters: Sequence[Sequence[int]]) -> ExpertGroups:
    order = [member for cluster in clusters for member in cluster]
    group_of = {member: at for at, cluster in enumerate(clusters) for member in cluster}
    groups, first = [], 0
    for size in sizes:
        groups.append(tuple(group_of[first + expert] for expert in range(size)))
        first += size
    return ExpertGroups(tuple(groups), tuple(order))


def _flat(groups: ExpertGroups) -> list[int]:
    return [group for layer in groups.groups for group in layer]
