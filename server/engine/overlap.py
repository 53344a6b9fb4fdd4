"""An engine whose host work overlaps with the device's work. `Engine.step` is the reference; a test checks that both engines produce the
same tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from server.engine.helper import Helper
from server.engine.loop import Engine, Outputs
from server.engine.scheduling.cache_pool import Copy
from server.engine.scheduling.plan import Plan


class OverlappedEngine(Engine):
    """An engine whose helper thread works while the engine's own thread runs the model. The helper publishes the last tokens, admits
    requests, prepares the draws of this step, plans the next step and builds its arrays. The helper is usually done long before the model
    returns. The helper calls no method of the model but `is_encoded`. The engine's thread makes all other calls, because waking another
    thread for them would delay each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._helper: Helper[Outputs] = Helper("engine")
        self._is_planned = False  # the scheduler's open plan is for the next step

    def step(self) -> bool:
        """Do what `Engine.step` does. The plan was usually made during the last step. If it has no tokens to run, the engine's thread
        publishes instead of the helper."""
        self._requests.admit()
        plan = self._next_plan()
        has_moved = self._move_pages(plan)
        self._announce(plan)
        if not plan.items:
            self._publish()
            self.scheduler.encoding.observe(plan, self._encode(plan))
            return plan.has_work or has_moved
        batch = self._batches.build(plan)
        self._helper.begin(partial(self._prepare, plan))
        try:
            encoding_s = self._encode(plan)
            launched = self._clock()
            logits, kernel_s = self._run(batch)
        finally:
            outputs = self._helper.result()
        self._sample(plan, logits, outputs)
        self._record(plan, self._clock() - launched, kernel_s)
        self.scheduler.encoding.observe(plan, encoding_s)
        return True

    def _next_plan(self) -> Plan:
        """Return the settled plan of this step: the plan made while the last step ran, extended by requests that have arrived since. If
        there is no such plan, or if it has no items left, make another plan. The new plan also gets the page copies of the first one,
        because a sequence that was taken out of the first plan to wait for its image still holds the target pages."""
        copies: list[Copy] = []
        if self._is_planned:
            self._is_planned = False
            plan = self._settled(self.scheduler.extend())
            if plan.items:
                return plan
            copies = plan.copies
        plan = self._settled(self.scheduler.schedule())
        plan.copies[:0] = copies
        return plan

    def _prepare(self, plan: Plan) -> Outputs:
        """On the helper's thread: publish the last tokens, admit requests, prepare the draws of this step, and plan and prepare the next
        step."""
        self._publish()
        self._requests.admit()
        outputs = self._outputs(plan, self._masks(plan))
        following = self.scheduler.schedule()
        if following.items:
            self._batches.prepare(following)
        self._is_planned = True
        return outputs

    def close(self) -> None:
        self._helper.close()
        super().close()
