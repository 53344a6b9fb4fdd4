"""The scheduler: which tokens run in the next step.

Decoding sequences come first, in order of rank: priority, then arrival. The rest of the token budget goes to prompts, in chunks, in the
order of the fair queue. When pages run short, the worst-ranked sequence is preempted and computed again later (mostly from the prefix
cache). When slots (places in the batch) run short, a sequence of an API key that has more than its share of slots is preempted. A sequence
has had its turn once it has generated enough tokens (`Sequence.had_turn`); before that it is fresh. Fresh sequences take slots of the same
key's sequences that had their turn, until both kinds hold as many slots. So the wait of a request does not depend on how much the key's
other requests still generate. The best-ranked sequence always advances, and no sequence is admitted that could not finish alone, so the
engine always makes progress.

Sequences of batch jobs (priority `IDLE`) run only in the room that other sequences leave in steps. They lengthen the steps of other
sequences only a little, and a step of batch jobs alone is short.

A plan may be made while the step before it still runs: the tokens of that step are then awaited. `settle` closes the plan once these tokens
are known. If a sequence ends or is parked before that, it is taken out of the open plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from server.engine.request import Request, Sequence, Stage, among
from server.engine.scheduling.cache_log import CacheLog
from server.engine.scheduling.cache_pool import CachePool
from server.engine.scheduling.encoding import EncodingQueue
from server.engine.scheduling.fair_queue import FairQueue, is_live
from server.engine.scheduling.pace import Measured, Pace
from server.engine.scheduling.plan import Item, Plan
from server.engine.step_model import StepLimits
from server.load_settings import MAX_GAP_MS


class Scheduler:
    """Plans the steps of an engine, and gives sequences their slots and pages."""

    def __init__(
        self,
        limits: StepLimits,
        pace: Pace | None = None,
        log: CacheLog | None = None,
        is_encoded: Callable[[bytes], bool] = lambda _key: True,
    ) -> None:
        """Without `pace`, the costs of steps are measured while serving. Changes of the prefix cache are written into `log`, if there is
        one. `is_encoded` tells whether the model has the encoded rows of the excerpt with a key."""
        assert limits.max_seqs <= limits.max_tokens, limits
        self.limits = limits
        self.pool = CachePool.of(limits, log)
        self.pace = pace or Pace(limits.max_tokens, Measured(), MAX_GAP_MS / 1000)
        self.queue: FairQueue[Sequence] = FairQueue()  # sequences that wait, and running ones whose prompt is not computed yet
        self.encoding = EncodingQueue(limits, self.pace, is_encoded)  # running sequences that wait for their images or audio
        self.running: list[Sequence] = []  # in order of rank
        self.num_preemptions = 0
        self.paused = False
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._open = Plan()  # planned but not settled
        self._launched: list[Sequence] = []  # sequences of the last settled plan
        self._preempted: set[Sequence] = set()  # preempted while making the open plan
        # the sequence that had no room when the open plan was made, unless other sequences have made room since
        self._refused: Sequence | None = None

    def pause(self, paused: bool) -> None:
        """While `paused`, plan nothing. Sequences may still end."""
        self.paused = paused

    def add(self, request: Request) -> None:
        """Queue the sequences of a request. The first choice that has no generated tokens computes the prompt. Other choices without
        generated tokens wait for this first one, and are then forked from it."""
        alive = [seq for seq in request.sequences if seq.stage is Stage.WAITING]
        fresh = [seq for seq in alive if seq.num_known == seq.num_prompt]
        request.leader, request.followers = (fresh[0], fresh[1:]) if fresh else (None, [])
        for seq in alive:
            if seq not in request.followers:
                self.queue.push(seq)

    def finish(self, seq: Sequence) -> None:
        """End a sequence at any stage, and give its pages back at once. If other choices wait for this one to compute the prompt, one of
        them computes it instead."""
        request = seq.request
        self._unplan(seq)
        self._dequeue(seq)
        if seq in request.followers:
            request.followers.remove(seq)
        self._vacate(seq)
        seq.stage = Stage.FINISHED
        if seq is request.leader and request.followers:
            request.leader = request.followers.pop(0)
            self.queue.push(request.leader)

    def park(self, seq: Sequence) -> None:
        """Take a sequence out of the batch until `resume`. If one of its rows is in flight, no token is drawn from that row."""
        self._unplan(seq)
        self._dequeue(seq)
        self._vacate(seq)
        seq.stage = Stage.PARKED

    def resume(self, seq: Sequence) -> None:
        """Queue a parked sequence again."""
        assert seq.stage is Stage.PARKED, seq
        seq.stage = Stage.WAITING
        self.queue.push(seq)

    def rewind(self, seq: Sequence) -> None:
        """Continue a sequence after its last tokens were removed. The sequence keeps its slot. None of its rows may be in flight."""
        self._unplan(seq)
        assert not seq.num_awaited, seq
        seq.num_computed = self.pool.rewind(seq.held, seq.token_ids, min(seq.num_computed, seq.num_known - 1))
        self._refused = None
        seq.num_reused = min(seq.num_reused, seq.num_computed)

    def schedule(self) -> Plan:
        """Make the plan of the next step, and return it. The plan stays open until `settle`, and is empty while paused. First publish the
        pages that the last settled plan has filled, and queue the choices that waited for a prompt in that plan."""
        assert not self._open.items
        for seq in self._launched:
            if seq.slot >= 0:  # it still runs
                if seq.num_computed >= seq.held.num_unpublished:
                    self._publish(seq)
                if seq.request.followers and seq is seq.request.leader and seq.num_computed >= seq.num_prompt:
                    for follower in seq.request.followers:
                        self.queue.push(follower)
                    seq.request.followers = []
        self._launched = []
        self._preempted, self._refused = set(), None
        self._open = Plan()
        if not self.paused:
            self._plan_decodes()
            self.extend()
        return self._open

    def extend(self) -> Plan:
        """Add prompts to the open plan while it has room, and return it. Add nothing while paused. Items that were planned before are kept,
        except those of sequences that are preempted, and those of idle sequences if a prompt of another sequence has arrived since."""
        plan = self._open
        if self.paused:
            return plan
        for seq in self.encoding.take_done():
            self.queue.push(seq)
            self._refused = None  # `_has_room` no longer counts the pages that these sequences need
        if plan.num_idle and self._live_prompt_waits:
            self._withdraw_idle()
        most = self.pace.prefill_budget(plan.num_decode, is_halved=is_live(self.encoding.first_priority))
        while (budget := self._left_of(most)) > 0 and (seq := self.queue.head(self._fresh_first)) is not None and seq not in plan.items:
            if seq.is_idle and self._left_for_idle() < 1:
                break
            if seq.stage is Stage.WAITING and not self._admit(seq):
                self._plan_admitted(most)
                break
            self._plan_prompt(seq, budget)
            if seq in self.encoding:
                continue  # `seq` waits for its images or audio, so other prompts may run
            if seq not in plan.items or not plan.items[seq].draws:
                break  # this step has no budget, pages or rows for the rest of the prompt
        return plan

    def _left_of(self, most: int) -> int:
        """Return how many more prompt tokens the open plan may take, if its budget for prompts is `most`."""
        plan = self._open
        return min(self.limits.max_tokens - plan.num_tokens, most - plan.num_prefill - plan.num_context)

    def _left_for_idle(self) -> int:
        """Return how many more tokens of idle sequences the open plan may take: none while a prompt of another sequence waits."""
        plan = self._open
        if self._live_prompt_waits:
            return 0
        return self.pace.idle_budget(plan.num_tokens - plan.num_idle) - plan.num_idle

    @property
    def _live_prompt_waits(self) -> bool:
        """Whether a prompt waits, in the queue or for an encoding, with a better priority than that of batch jobs. A batch job's encoding
        has such a priority once its parts were dropped for another request."""
        return is_live(self.queue.first_priority) or is_live(self.encoding.first_priority)

    def _withdraw_idle(self) -> None:
        """Take all idle sequences out of the open plan, and queue their prompts again."""
        self._refused = None
        for item in [item for item in self._open.items.values() if item.seq.is_idle]:
            self._unplan(item.seq)
            # keep the page of its first token if that page has the keys and values of its audio, because the audio is not heard again
            self.pool.give_back_after(item.seq.held, max(item.start, item.seq.has_heard))
            if item.is_prefill and item.seq not in self.queue:
                self.queue.push(item.seq)

    def settle(self, plan: Plan) -> Plan:
        """Close the plan, now that the tokens awaited when it was made are known. Drop rows that are no longer needed. Take out sequences
        whose encoded excerpts the model has dropped meanwhile, and let them wait, so that the step itself need not encode. Choose what to
        encode before the step."""
        assert plan is self._open
        if self.limits.excerpts:
            self._let_wait(plan)
            plan.needed = frozenset(self.encoding.keys_read(plan, self.running))
        if len(self.encoding) and not self.paused:
            plan.encodings = self.encoding.choose(plan, allows_idle=self._left_for_idle() >= 1)
        for item in plan.items.values():
            if item.draws and item.stop < item.seq.num_known:  # a grammar forced the tokens after this row, so no token is drawn from it
                assert item.num_rows == 1
                item.draws = False
                item.num_rows -= 1
                item.seq.num_awaited -= 1
                plan.num_rows -= 1
                plan.num_changes += 1
        self._open = Plan()
        self._launched = list(plan.items)
        return plan

    def collect(self, plan: Plan) -> None:
        """Mark the plan's rows as computed: their tokens are drawn now, and so are no longer awaited."""
        for item in plan.items.values():
            item.seq.num_awaited -= item.draws

    def _let_wait(self, plan: Plan) -> None:
        """Take sequences out of the open plan if they read excerpts whose encoded rows the model has dropped since the plan was made. Let
        these sequences wait for the excerpts."""
        for item in [item for item in plan.items.values() if self.encoding.missing(item.seq, item.start, item.stop)]:
            self._unplan(item.seq)
            self.pool.give_back_after(item.seq.held, item.start)
            if item.seq in self.queue:
                self.queue.remove(item.seq)
            self.encoding.push(item.seq, item.count)

    def observe(self, plan: Plan, step_s: float) -> None:
        """Correct the estimates of step costs by a step that took `step_s` seconds."""
        self.pace.observe(plan.num_tokens, step_s, plan.num_idle)

    def limit_s(self, plan: Plan) -> float:
        """Return how long the step of a plan, and the encoding before it, may take before it counts as stalled."""
        return self.pace.limit_s(max(1, plan.num_tokens + sum(encoding.cost for encoding in plan.encodings)))

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raise an error if the records contradict each other. `holders` are all sequences of unfinished requests."""
        alive = [seq for seq in holders if seq.stage is not Stage.FINISHED]
        self.pool.check_integrity(seq.held for seq in alive)
        slots = sorted([*self._slots, *(seq.slot for seq in self.running)])
        assert slots == list(range(self.limits.max_seqs)), slots
        assert [seq.rank for seq in self.running] == sorted(seq.rank for seq in self.running)
        for seq in alive:
            seq.check()
            assert (seq.slot >= 0) == (seq.stage is Stage.RUNNING) == (seq in self.running), seq

    # --- the two parts of a plan -----------------------------------------------------------------------------------------

    def _plan_decodes(self) -> None:
        """Plan the tokens of running sequences whose prompts are computed: one each, or several if tokens were forced. Idle sequences get
        at most `_left_for_idle` tokens together. Keys are charged if a prompt waits."""
        plan, max_tokens = self._open, self.limits.max_tokens
        queue = self.queue if len(self.queue) else None  # None: no prompt waits, so no look-up and no charge is needed
        encoding = self.encoding if len(self.encoding) else ()
        left_for_idle: int | None = None  # computed at the first idle sequence; None: not reached yet
        for seq in list(self.running):
            num_tokens = len(seq.token_ids) + seq.num_awaited
            if num_tokens >= seq.max_len or seq.slot < 0 or (queue is not None and seq in queue) or seq in encoding:
                continue  # its last token is awaited, or it was preempted just now, or its prompt is not computed
            count = min(num_tokens - seq.num_computed, max_tokens - plan.num_tokens)
            if seq.is_idle:
                left_for_idle = self._left_for_idle() if left_for_idle is None else left_for_idle
                if left_for_idle < 1:
                    break
                count = min(count, left_for_idle)
                left_for_idle -= count
            count = self._whole(seq, count)
            if count > 0 and self._place(seq, count, num_rows=1, is_prefill=False) and queue is not None:
                queue.charge(seq.fairness_key, count)

    def _plan_prompt(self, seq: Sequence, budget: int) -> None:
        """Plan the next chunk of a prompt, of at most `budget` tokens unless `_whole` makes it longer, and charge the sequence's key. After
        the last chunk, the sequence leaves the queue. If the chunk reads excerpts that are not encoded yet, let the sequence wait instead.
        Plan nothing if the step has no room for the chunk, or if the sequence was preempted because pages are short."""
        count = min(seq.num_to_compute, budget)
        if seq.is_idle:
            count = min(count, self._left_for_idle())
        count = self.encoding.affordable(seq, count, budget)
        count = self._whole(seq, count)
        if count > 0 and self._must_encode(seq, count):
            return
        num_rows = 1
        if (num_known := seq.num_rows_known) is not None:
            # A step has max_seqs rows at most. Rows that were computed before a preemption do not count.
            num_done = max(num_known - seq.num_computed, 0)
            count = min(count, num_done + self.limits.max_seqs - self._open.num_rows)
            num_rows = max(count - num_done, 0)
        if count < 1 or self._open.num_rows == self.limits.max_seqs or not self._place(seq, count, num_rows=num_rows):
            return
        self.queue.charge(seq.fairness_key, count)
        if self._open.items[seq].draws:
            self.queue.remove(seq)

    def _plan_admitted(self, most: int) -> None:
        """Plan chunks of admitted prompts when the queue's head cannot be admitted. Without this, these prompts would never finish and free
        pages for the head."""
        for seq in list(self.running):
            if seq.stage is Stage.RUNNING and seq in self.queue and seq not in self._open.items and (budget := self._left_of(most)) > 0:
                self._plan_prompt(seq, budget)

    def _place(self, seq: Sequence, count: int, *, num_rows: int, is_prefill: bool = True) -> bool:
        """Add the next `count` tokens of `seq` to the plan. Return False if `seq` was preempted, because pages are short."""
        start = seq.num_computed
        if not self._make_writable(seq, count):
            return False
        draws = start + count == len(seq.token_ids) + seq.num_awaited
        wanted = num_rows if draws or seq.num_rows_known is not None else 0
        assert draws <= wanted <= count, (seq, wanted)
        # A single token reads its context as a decoding sequence does, so the context costs nothing extra.
        num_context = self.pace.context_tokens(start) if is_prefill and count > 1 else 0
        self._open.add(Item(seq, start, count, wanted, draws, is_prefill, num_context))
        seq.num_computed += count
        seq.num_awaited += draws
        return True

    def _make_writable(self, seq: Sequence, count: int) -> bool:
        """Give `seq` pages for its next `count` tokens. Preempt worse-ranked sequences if pages are short. Return False if `seq` itself was
        preempted."""
        start = seq.num_computed
        if start + count > seq.held.num_writable:
            while (copies := self.pool.make_writable(seq.held, start, start + count)) is None:
                if not self._preempt_worst(seq):
                    return False
            self._open.copies += copies
        return True

    def _must_encode(self, seq: Sequence, count: int) -> bool:
        """Let `seq` wait if its next `count` tokens read excerpts that are not encoded yet, or audio that is not heard yet. Return whether
        `seq` waits, or was preempted because there are no pages for its audio."""
        if not self.encoding.must_wait(seq, count):
            return False
        if not self.encoding.hears(seq) or self._make_writable(seq, 1):
            self.queue.remove(seq)
            self.encoding.push(seq, count)
        return True

    def _whole(self, seq: Sequence, count: int) -> int:
        """Return how many tokens to plan instead of the next `count`, so that no chunk ends within an excerpt whose tokens attend to each
        other in both directions. If the next `count` tokens end within such an excerpt, plan only the tokens before it. If the excerpt
        comes first, plan all of it, even beyond the budget; if this step has no room for it, return 0."""
        start = seq.num_computed
        kinds = tuple(limits.kind for limits in self.limits.excerpts if limits.both_ways)
        if not kinds or count < 1:
            return count
        for placed in among(seq.request.excerpts, start, start + count):
            if start + count < placed.stop and isinstance(placed.excerpt, kinds):
                if placed.start > start:
                    return placed.start - start
                whole = placed.stop - start
                return whole if whole <= self.limits.max_tokens - self._open.num_tokens else 0
        return count

    # --- admission and preemption ----------------------------------------------------------------------------------------

    def _admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence a slot, and the pages of its beginning that are computed already. Preempt other sequences for it if
        `_preempt_lower_priority` or `_preempt_greediest` allows that. Return False if `seq` must wait."""
        if seq.num_awaited or seq in self._preempted:
            return False  # its last rows may still be in flight: wait until their tokens are known
        if seq is self._refused:
            return False  # do not look up its pages again: that takes milliseconds for a long prompt
        while not self._slots:
            if not self._preempt_lower_priority(seq) and not self._preempt_greediest(seq):
                return False
        self._find_beginning(seq)
        while not self._has_room(seq):
            if not self._preempt_lower_priority(seq):
                self.pool.release(seq.held)
                seq.num_reused = seq.num_computed = 0
                self._refused = seq
                return False
        seq.slot = self._slots.pop()
        seq.stage = Stage.RUNNING
        request = seq.request
        if request.num_cached is None:
            request.num_cached = min(seq.num_reused, seq.num_prompt)
            self.pool.count_reuse(seq.num_prompt, request.num_cached)
        at = next((i for i, other in enumerate(self.running) if other.rank > seq.rank), len(self.running))
        self.running.insert(at, seq)
        return True

    def _has_room(self, seq: Sequence) -> bool:
        """Return whether there are enough pages for all known tokens of `seq` (its prompt, and tokens generated before a preemption) and of
        the sequences that wait for their images or audio, plus one page for each running sequence, to avoid an early preemption."""
        prompts = [(one.held, one.num_computed, one.num_known) for one in (seq, *self.encoding)]
        return self.pool.can_admit(prompts, len(self.running))

    def _find_beginning(self, seq: Sequence) -> None:
        """Give `seq` pages that are computed already: those of the leader's prompt if a step with all of it was launched and `seq` has
        generated nothing, otherwise published pages. There may be none."""
        leader = seq.request.leader
        seq.num_reused = 0
        if leader is not None and leader is not seq and self._has_launched_prompt(leader) and seq.num_known == seq.num_prompt:
            seq.num_reused = self.pool.fork(leader.held, seq.held, seq.num_prompt - 1)
        if not seq.num_reused:
            seq.num_reused = self.pool.reuse(seq.held, seq.token_ids, seq.num_reusable)
        seq.num_computed = seq.num_reused

    def _has_launched_prompt(self, seq: Sequence) -> bool:
        """Return whether the prompt of `seq` was computed before the open plan. Only then may it be forked: pages are copied for a fork
        before the step runs, so the step of the open plan must not write them."""
        item = self._open.items.get(seq)
        num_launched = seq.num_computed if item is None else item.start
        return seq.stage is Stage.RUNNING and num_launched >= seq.num_prompt

    def _preempt_lower_priority(self, seq: Sequence) -> bool:
        """Preempt the worst-ranked running sequence if its priority is lower than that of the waiting `seq`. Return whether one was
        preempted."""
        if not self.running or self.running[-1].rank[0] <= seq.rank[0]:
            return False
        self._preempt(self.running[-1])
        return True

    def _preempt_greediest(self, seq: Sequence) -> bool:
        """Preempt a running sequence to free a slot for the waiting `seq`, and return True. If the key with the most slots has at least two
        slots more than the key of `seq`, preempt the worst-ranked sequence of the former key, so that one client cannot starve others.
        Otherwise, if `seq` is fresh, and its own key has at least two more running sequences that had their turn than fresh ones, preempt
        the worst-ranked of those that had their turn. A difference of two or more shrinks with each preemption, so preemptions do not
        alternate forever. Preempt nothing and return False in all other cases, and also if the sequence to preempt has a better priority
        than `seq`, or if there are not enough pages for `seq`."""
        held = Counter(other.fairness_key for other in self.running)
        greediest, most = max(held.items(), key=lambda pair: pair[1])
        if most > held[seq.fairness_key] + 1:
            victim = self._worst([other for other in self.running if other.fairness_key == greediest])
        else:
            num_fresh, others = self._held(seq.fairness_key)
            if seq.had_turn or len(others) <= num_fresh + 1:
                return False
            victim = others[-1]
        if victim.rank[0] < seq.rank[0] or not self._has_room(seq):
            return False
        self._preempt(victim)
        return True

    def _preempt_worst(self, seq: Sequence) -> bool:
        """Preempt the worst-ranked running sequence to free pages for the running `seq`. Return False if `seq` itself was preempted."""
        worst = self._worst(self.running)
        self._preempt(worst)
        return worst is not seq

    def _worst(self, running: list[Sequence]) -> Sequence:
        """Return the worst-ranked of `running`. If that is a fresh sequence, and more running sequences of its key had their turn than are
        fresh, return the worst-ranked of those that had their turn, if it has the same priority. So the result is never the best-ranked of
        several sequences."""
        worst = running[-1]
        if worst.had_turn:
            return worst
        num_fresh, others = self._held(worst.fairness_key)
        return others[-1] if len(others) > num_fresh and others[-1].rank[0] == worst.rank[0] else worst

    def _fresh_first(self, key: str) -> bool:
        """Return whether the fresh sequences of a key are admitted before those that had their turn."""
        num_fresh, others = self._held(key)
        return len(others) > num_fresh

    def _held(self, key: str) -> tuple[int, list[Sequence]]:
        """Return how many fresh sequences of a key run, and its running sequences that had their turn, in order of rank."""
        running = [seq for seq in self.running if seq.fairness_key == key]
        others = [seq for seq in running if seq.had_turn]
        return len(running) - len(others), others

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence out of the batch, and queue it to be computed again."""
        self._unplan(seq)
        self._vacate(seq)
        seq.stage = Stage.WAITING
        self._preempted.add(seq)
        self.num_preemptions += 1
        self._dequeue(seq)
        self.queue.push(seq)

    def _dequeue(self, seq: Sequence) -> None:
        """Remove a sequence from the queue in which it waits. Do nothing if it waits in none."""
        if seq in self.queue:
            self.queue.remove(seq)
        elif seq in self.encoding:
            self.encoding.remove(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Give back the slot and the pages of a sequence. Its full pages stay in the prefix cache."""
        if seq.stage is Stage.RUNNING:
            self._publish(seq)
            self.running.remove(seq)
            self._slots.append(seq.slot)
            seq.slot = -1
        self.pool.release(seq.held)
        seq.num_reused = seq.num_computed = 0
        seq.has_heard = False
        self._refused = None

    def _publish(self, seq: Sequence) -> None:
        """Publish the full pages of a sequence, so that other prompts find them."""
        self.pool.publish(seq.held, seq.token_ids, min(seq.num_computed, seq.num_known))

    def _unplan(self, seq: Sequence) -> None:
        """Take a sequence out of the open plan, if it is there."""
        item = self._open.items.get(seq)
        if item is None:
            return
        self._open.remove(item)
        seq.num_computed -= item.count
        seq.num_awaited -= item.draws
