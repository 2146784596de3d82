"""Plans of one submission with something removed, and how often they answer as expected.

    RaisedPipeline, Loss --finish, pack, emit--> sections --native here, else simulator--> accuracy

Called by `compiler.driver.choose_removal`. Native code of the best target that this machine runs
answers; the simulator does where it runs none, with the same bits and much later. So the accuracy
of a loss does not depend on the machine. Runs native code in this process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compiler.contract.native import NativePlan
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import KvKind
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.driver.cache import StageCache
from compiler.driver.cards import Card
from compiler.driver.evaluate import Outcome, answer_cards, score
from compiler.driver.kernel_stage import kernels_for
from compiler.driver.native_check import host_target
from compiler.driver.routing import learn_routing
from compiler.driver.sections import pipeline_section
from compiler.emitters.plan import EmittedPlan, emit_plan
from compiler.hardware.targets import Target
from compiler.kernels.program import Module
from compiler.passes.pipeline import Loss, RaisedPipeline, finish_pipeline
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.module import PackedWeight, pack_module
from compiler.quant.record import CalibrationRecord, InputSample
from compiler.quant.w4 import Floats, Grid

Pack = Callable[[Floats, Grid | None, InputSample | None], PackedWeight]


@dataclass(frozen=True, slots=True)
class RemovalTrials:
    """Tries losses.

    Attributes:
        raised: The submission before anything is removed.
        spec: Its words and limits.
        pack: Packs one weight; remembers those that do not change from trial to trial.
        cache: Where kernel libraries are.
        target: What runs the plans; None for the simulator.
        kv: How keys and values are stored, whatever else is lost.
    """

    raised: RaisedPipeline
    spec: PipelineSpec
    pack: Pack
    cache: StageCache
    target: Target | None
    kv: KvKind = KvKind.F32

    @classmethod
    def of(
        cls, raised: RaisedPipeline, pack: Pack, cache: StageCache, kv: KvKind = KvKind.F32
    ) -> "RemovalTrials":
        """Return trials on this machine."""
        return cls(raised, raised.ctx.spec, pack, cache, host_target(), kv)

    def module(self, loss: Loss) -> Module:
        """Return the lowered module of a loss."""
        return finish_pipeline(self.raised, loss=replace(loss, kv=self.kv)).module

    def accuracy(
        self, module: Module, cards: Sequence[Card], record: CalibrationRecord | None = None
    ) -> float:
        """Return the share of questions that a module answers as expected; see `answers`."""
        return score(self.answers(module, cards, record)).accuracy

    def answers(
        self, module: Module, cards: Sequence[Card], record: CalibrationRecord | None = None
    ) -> list[Outcome]:
        """Ask a module every question of the cards.

        Args:
            module: What `module` returned.
            cards: At least one, with a question.
            record: Routers and scales are searched on it, as a compilation does; without it they
                are plain, which is faster.

        Raises:
            ContractError: A word is not in the vocabulary, or a picture has the wrong size.
            ToolchainError: The C compiler failed.
        """
        emitted = self._emitted(module, record)
        plan = parse_plan(emitted.plan_bytes)
        pipeline = pipeline_section(self.spec, plan)
        sections = {**emitted.sections, "plan": emitted.plan_bytes}
        if self.target is None:
            return answer_cards(BundleSimulator(sections), pipeline, cards)
        kernels = kernels_for(self.target, plan.ops, self.cache)
        with NativePlan(kernels, emitted.plan_bytes, sections) as running:
            return answer_cards(running, pipeline, cards)

    def stored_bytes(self, module: Module) -> int:
        """Return the bytes of all sections with weights."""
        return sum(len(data) for data in self._emitted(module, None).sections.values())

    def _emitted(self, module: Module, record: CalibrationRecord | None) -> EmittedPlan:
        learned = learn_routing(module, record).module
        packed = pack_module(learned, record=record, pack=self.pack)
        return emit_plan(learned, weights_packed=packed.packed)
