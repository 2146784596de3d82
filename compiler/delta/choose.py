"""Decide how each changed section is coded, before anything is.

    same layout                  by planes
      ... and bytes moved        whole, if that is smaller
      ... and known factors      codes by replay, if that is exact and smaller
    the plan says what moved     aligned (`compiler.delta.align`)
    anything else                whole

Differences in place beat a byte matcher unless bytes moved, which is rare and cheap to see
(`compiler.delta.moves`); only then is a section coded both ways to compare.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from compiler.contract.delta import NO_SHA256, RECORD_BYTES, DeltaHeader, DeltaSection
from compiler.contract.delta_alignment import MAX_STEPS
from compiler.contract.planes import require_component
from compiler.delta.align import WeightsBySection, align, weights_by_section
from compiler.delta.estimates import content_bytes
from compiler.delta.moves import Known
from compiler.delta.records import Bundle, EncodeOptions, RecordMaker, Replays
from compiler.delta.replay import encode_replay, weight_planes
from compiler.delta.sections import SectionSource, Sources

INFORMATIVE: Final = 0.5
"""Differences below this share of the content: nothing moved, whatever a matcher would find."""
SAMPLES: Final = 8
SAMPLE_BYTES: Final = 32 * 1024
KNOWN_BYTES: Final = 2 * 1024 * 1024
PLAN: Final = "plan"


def changed_sections(old: Bundle, new: Bundle) -> tuple[DeltaSection, ...]:
    """Return the sections of `new` that `old` does not have like that, in component order.

    Raises:
        ContractError: A component name is outside the grammar.
    """
    weights = weights_by_section(old.get(PLAN)), weights_by_section(new.get(PLAN))
    left = MAX_STEPS
    entries = []
    for component in sorted(new):
        after, before = new[component], old.get(require_component(component))
        if before is not None and before.sha256 == after.sha256:
            continue
        section = _section(component, before, after)
        if before is not None:
            section = _aligned(section, before, after, weights, left)
            left -= section.alignment.steps if section.alignment is not None else 0
        entries.append(section)
    return tuple(entries)


def choose_sections(
    old: Bundle, new: Bundle, options: EncodeOptions, replays: Replays
) -> tuple[DeltaSection, ...]:
    """Return the changed sections, each coded the way that takes least.

    Raises:
        ContractError: A component name is outside the grammar.
    """
    return tuple(
        _chosen(section, old, new, options, replays) for section in changed_sections(old, new)
    )


def _section(component: str, before: SectionSource | None, after: SectionSource) -> DeltaSection:
    same_layout = before is not None and before.planes == after.planes
    return DeltaSection(
        component,
        before.sha256 if before is not None else NO_SHA256,
        after.sha256,
        before.length if before is not None else 0,
        after.length,
        after.planes if same_layout else (),
    )


def _aligned(
    section: DeltaSection,
    before: SectionSource,
    after: SectionSource,
    weights: tuple[WeightsBySection, WeightsBySection],
    most_steps: int,
) -> DeltaSection:
    were, are = (found.get(section.component, ()) for found in weights)
    if not (before.planes and after.planes and were and are):
        return section
    found = align(before, after, were, are, most_steps)
    if found is None:
        return section
    return replace(section, planes=after.planes, old_planes=before.planes, alignment=found)


def _chosen(
    section: DeltaSection, old: Bundle, new: Bundle, options: EncodeOptions, replays: Replays
) -> DeltaSection:
    def cost(candidate: DeltaSection) -> int:
        draft = DeltaHeader((candidate,), options.store_reverse, 0, 0, 0)
        made = RecordMaker(old, new, draft, options, replays).records()
        return sum(RECORD_BYTES + len(payload) for _, payload in made)

    if not section.planes or section.planes != (section.old_planes or section.planes):
        return section
    if section.alignment is not None:
        return min(section, replace(section, old_planes=(), alignment=None), key=cost)
    candidates = [section, *_replayed(section, old, new, replays)]
    if _may_have_moved(old[section.component], new[section.component]):
        candidates.append(replace(section, planes=()))
    return min(candidates, key=cost) if len(candidates) > 1 else section


def _replayed(
    section: DeltaSection, old: Bundle, new: Bundle, replays: Replays
) -> Iterator[DeltaSection]:
    """Yield the section with all planes that factors make exactly, if there are any."""
    exact = []
    for component, number in sorted(replays):
        if component != section.component:
            continue
        planes = weight_planes(section.planes, number)
        factors = replays[component, number]
        if encode_replay(Sources(old), Sources(new), component, planes, factors) is not None:
            exact.append(number)
    if exact:
        yield replace(section, replays=tuple(exact))


def _may_have_moved(old: SectionSource, new: SectionSource) -> bool:
    """Return whether bytes of a section of the same layout seem to come from elsewhere in it."""
    step = max(SAMPLE_BYTES, new.length // SAMPLES)
    offsets = range(0, new.length, step)
    samples = [(old.read(SAMPLE_BYTES, at), new.read(SAMPLE_BYTES, at)) for at in offsets]
    samples = [(was, now) for was, now in samples if was != now and not _is_informed(was, now)]
    if not samples:
        return False
    return any(
        known.holds(now, was)
        for known in (Known(old.read(KNOWN_BYTES, at)) for at in range(0, old.length, KNOWN_BYTES))
        for was, now in samples
    )


def _is_informed(was: bytes, now: bytes) -> bool:
    """Return whether knowing `was` saves much of `now`."""
    before, after = np.frombuffer(was, np.uint8), np.frombuffer(now, np.uint8)
    return content_bytes(after - before) < INFORMATIVE * content_bytes(after)
