"""The hybrid token scheduler: plans the next step.

A step runs a token of each decoding sequence, then chunks of prompts, then as many finetuning
tokens as fit (FlexLLM v2 §6.2):

    s = argmax f(c, s) ≤ SLO          f, the latency of c inference and s finetuning tokens

The time between two tokens of a request is a gap. A chunk of a prompt goes into a step only if no
gap of a decoding sequence is predicted to exceed its SLO per token, or without an SLO,
`prompt_stretch` times the step without prompts. Steps alternate between the prompt that was
admitted first and new requests with the shortest prompts, so that a long prompt does not delay
short ones and takes at most twice its time. Prompts are admitted while pages are free; when pages
run out, the sequence admitted last releases its pages and is recomputed later.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from itertools import takewhile

from pcg.errors import GenerationError, OutOfMemoryError, PcgError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.adapters.cache import AdapterCache, ServedAdapter
from pcg.runtime.admission.backlog import UNLIMITED, Backlog, QueueLimits, new_requests
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.latency import Latency
from pcg.runtime.admission.limits import Limits, why_never, why_unreachable
from pcg.runtime.admission.policy import Policy
from pcg.runtime.admission.step_bound import StepBound
from pcg.runtime.engine.device.device import Device
from pcg.runtime.memory.pool import Needs, PagePool, PageTable, pages_for
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.prefixes import Prefixes
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step import Load, Plan
from pcg.runtime.sampling.grammars import Grammar

# ---------------------------------------------------------------------------------------- page room


class PageRoom:
    """Gives sequences pages for their tokens, in the pool that adapters share."""

    def __init__(self, pool: PagePool, adapters: AdapterCache) -> None:
        self.pool = pool
        self.adapters = adapters

    def most_of(self, sequence: Sequence) -> int:
        """Return the maximum number of pages for a sequence and its adapter."""
        return sequence.most_pages + self.adapters.pages_of(sequence.request.adapter)

    def holds(self, sequence: Sequence, running: int) -> bool:
        """Return True if the pool has pages for a waiting sequence and its adapter.

        A free page remains for each of the `running` sequences, so that their growth does not
        preempt the new sequence immediately.
        """
        adapter = sequence.request.adapter
        need = self._missing(sequence) + running
        if not self.adapters.has(adapter):
            need += self.adapters.pages_of(adapter)
        return need <= self.pool.free + self.adapters.idle_pages

    def give(self, sequence: Sequence, running: int, expected: int) -> bool:
        """Give a sequence its adapter, and pages for its tokens; return False without room.

        Args:
            expected: number of pages to reserve for the sequence while other pages are free.
        """
        adapter = sequence.request.adapter
        if not self.holds(sequence, running):
            return False
        if adapter is not None and not self.adapters.bring(adapter):
            return False
        self.adapters.use(adapter)
        need = self._missing(sequence)
        if not self.adapters.make_room(need):
            self.adapters.release(adapter)
            return False
        if sequence.table is None:
            sequence.table = self.pool.open(sequence.id, expected)
        self.pool.take_slot(sequence.table)
        self.pool.extend(sequence.table, need)
        return True

    def take_back(self, sequence: Sequence) -> None:
        """Take the pages of a sequence, and discard its cached tokens."""
        if sequence.table is not None:
            self.pool.close(sequence.table)
            sequence.table = None
        sequence.forget_cached()

    def bring_ahead(self, in_turn: Iterable[Sequence], running: int) -> list[ServedAdapter]:
        """Page in adapters of the next requests as far as pages are free; return the adapters."""
        wanted: dict[int, ServedAdapter] = {}
        room = self.pool.free + self.adapters.idle_pages - running
        for sequence in in_turn:
            adapter = sequence.request.adapter
            is_new = adapter is not None and adapter.version not in wanted
            room -= pages_for(sequence.length)
            room -= self.adapters.pages_of(adapter) if is_new else 0
            if room < 0:
                break
            if adapter is not None and is_new:
                self.adapters.bring(adapter)
                wanted[adapter.version] = adapter
        return list(wanted.values())

    @staticmethod
    def _missing(sequence: Sequence) -> int:
        held = 0 if sequence.table is None else len(sequence.table.pages)
        return pages_for(sequence.length) - held


# ---------------------------------------------------------------------------------------- scheduler


_LAST_ROW = Load(sampled=1, chunks=1)
"""The load of a prompt in addition to its tokens: a sampled token after the last one."""
_ONE = Load.of(1, 0) + Load(sampled=1)
"""The load of a decoding sequence, used for a step without decoding sequences."""
_FIRST, _GROWTH = 64, 4
"""Prompt tokens in the first step, whose time is measured, and the growth factor of prompt tokens
per step over the largest step so far, as predictions for larger steps are less accurate."""

_SURE = 0.75
"""The usable share of `prompt_stretch`: a margin, as predictions lag behind growing contexts."""


class Scheduler:
    """Plans steps. The scheduler holds no tensors, so that simulators can use it.

    Attributes:
        waiting: waiting requests, unordered; the keys of a dict, like `running`, for fast removal.
            The policy orders them.
        preparing: requests that wait for the compilation of their guides.
        backlog: number of waiting new requests, and of their tokens, by tenant.
        running: admitted requests, in order of admission.
        forward: measured latency of a forward; None if no SLO depends on it.
        pace: latency for planning steps; None while unknown.
    """

    def __init__(
        self,
        pool: PagePool,
        adapters: AdapterCache,
        limits: Limits,
        policy: Policy | None = None,
        prefixes: Prefixes | None = None,
        queue: QueueLimits = UNLIMITED,
    ) -> None:
        self.pool = pool
        self.adapters = adapters
        self.limits = limits
        self.prefixes = prefixes
        self.policy: Policy = FairShare() if policy is None else policy
        self.policy.take()
        self.forward: Latency | None = None
        self.pace: Latency | None = None
        self.waiting: dict[Sequence, None] = {}
        self.preparing: dict[Sequence, Grammar] = {}
        self.backlog = Backlog(queue)
        self.running: dict[Sequence, None] = {}
        self._needs = Needs()
        self._room = PageRoom(pool, adapters)
        self._bound: StepBound | None = None
        self._blocked: Sequence | None = None
        self._is_turn_of_short = False
        self._most_read = max(_FIRST, limits.least_chunk)

    def attach(self, device: Device, note: Callable[[Kind, str], None]) -> None:
        """Connect the device, by a weak reference, and the event function."""
        self._device: Device = weakref.proxy(device)
        self._note = note
        self.adapters.on_page_in = lambda adapter: note(Kind.PAGED_IN, adapter.name)
        self.adapters.on_evict = self._evicted

    def _evicted(self, adapter: ServedAdapter) -> None:
        self._device.evict(adapter)
        self._note(Kind.EVICTED, adapter.name)

    # ------------------------------------------------------------------------------- a request

    def refusal(self, sequence: Sequence, reserved: int = 0) -> GenerationError | None:
        """Return the error that refuses a new request; `reserved`: pages that jobs may hold."""
        of_adapter = self.adapters.pages_of(sequence.request.adapter)
        never = why_never(sequence, of_adapter, self.pool.size - reserved)
        if never is not None:
            return OutOfMemoryError(never)
        if self.forward is not None:
            reason = why_unreachable(sequence, self.forward, self.limits)
            if reason is not None:
                return GenerationError(reason)
        return self.backlog.why_full(sequence.request)

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.preparing or self.running)

    @property
    def everyone(self) -> List[Sequence]:
        return (*self.waiting, *self.preparing, *self.running)

    @property
    def most_pages(self) -> int:
        """The largest number of pages that an open request and its adapter may need."""
        return self._needs.most

    def add(self, sequence: Sequence) -> None:
        self._add(sequence)
        if sequence in self.waiting:
            self.policy.add(sequence)

    def _add(self, sequence: Sequence) -> None:
        self.backlog.add(sequence)
        self._needs.add(self._room.most_of(sequence))
        grammar = sequence.grammar
        if grammar is None or (grammar.is_ready and grammar.error is None):
            self.waiting[sequence] = None
        else:
            self.preparing[sequence] = grammar

    def queue_prepared(self) -> list[tuple[Sequence, PcgError]]:
        """Queue requests with compiled guides; return requests with failed guides."""
        failed = []
        for sequence, grammar in [entry for entry in self.preparing.items() if entry[1].is_ready]:
            del self.preparing[sequence]
            self.waiting[sequence] = None
            self.policy.add(sequence)
            if grammar.error is not None:
                failed.append((sequence, grammar.error))
        return failed

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence in any state, and free its pages."""
        self._needs.remove(self._room.most_of(sequence))
        if sequence in self.preparing:
            del self.preparing[sequence]
            self.backlog.remove(sequence)
            return
        is_waiting = sequence in self.waiting
        if is_waiting:
            del self.waiting[sequence]
            self.backlog.remove(sequence)
            self.adapters.leave(sequence.request.adapter)
        else:
            del self.running[sequence]
            self._free(sequence)
        self.policy.drop(sequence, is_waiting=is_waiting)

    def forget(self, adapter: ServedAdapter, *, is_gone: bool) -> None:
        self.adapters.forget(adapter, is_gone=is_gone)
        if self.prefixes is not None:
            self.prefixes.forget(adapter)

    def restart(self, sequences: Iterable[Sequence], kept: Iterable[PageTable]) -> None:
        """Queue the given sequences, admitted ones first, after a failed call.

        All cached values are dropped, as the failed step may have overwritten them.

        Args:
            kept: page tables of other owners.
        """
        self.pool.reset(kept)
        self.adapters.reset()
        if self.prefixes is not None:
            self.prefixes.reset()
        self.backlog.clear()
        self.waiting, self.preparing, self.running = {}, {}, {}
        self._needs, self._blocked, self._bound = Needs(), None, None
        for sequence in sorted(sequences, key=_admitted_first):
            sequence.table, sequence.blocks.version, sequence.state = None, None, State.WAITING
            sequence.forget_cached()
            self._add(sequence)
        self.policy.restart(self.waiting)

    def fork(self, first: Sequence, follower: Sequence, now_s: float) -> None:
        """Start a continuation at the end of the prompt of the first continuation.

        The follower shares full pages and copies the last page. Without room, the follower waits.
        """
        table, need = _table(first), int(first.cached % PAGE_TOKENS > 0)
        follower.follow(first)
        self.add(follower)
        has_place = len(self.running) < self.limits.running and self.policy.has_place(follower)
        if not has_place or need + len(self.running) > self.pool.free + self.adapters.idle_pages:
            return
        self.adapters.use(first.request.adapter)
        self.adapters.make_room(need)
        full, follower.cached = first.cached // PAGE_TOKENS, first.cached
        follower.table = self.pool.fork(table, full, follower.id)
        self.pool.extend(follower.table, need)
        if need:
            self._device.copy_page(table.pages[full], follower.table.pages[full])
        self.pool.take_slot(follower.table)
        if table.slot >= 0:
            self._device.copy_states(table.slot, follower.table.slot)
        self._begin(follower, now_s)

    def _begin(self, sequence: Sequence, now_s: float) -> None:
        del self.waiting[sequence]
        self.backlog.remove(sequence)
        self.running[sequence] = None
        sequence.begin(now_s)
        self.policy.admit(sequence, now_s)

    # ------------------------------------------------------------------------------- a step

    def plan(self, now_s: float) -> Plan:
        slos_s = [sequence.times.tpot_slo_s for sequence in self.running]
        plan = Plan(min([slo_s for slo_s in slos_s if slo_s is not None], default=None))
        prompts, held = [], []
        bound = self._bound = self.policy.bound(self.pace, self.limits.idle_step_s)
        first = self._give_way()
        # Preempted sequences leave at the ends of these lists.
        in_order = self.policy.in_order(self.running)
        left = [each for each in in_order if not (each.ahead and each.is_spent)]
        for sequence in left:
            if sequence.length - sequence.cached > 1:
                prompts.append(sequence)
            elif bound is not None and not bound.has_room(plan, sequence):
                held.append(sequence)
            elif self._has_pages(sequence, 1, left):
                self._run(plan, sequence, 1)
        least_s = (
            0.0 if self.pace is None else self.pace.seconds(plan.load if plan.tokens else _ONE)
        )
        stretched_s = _SURE * self.limits.prompt_stretch * least_s if least_s else math.inf
        plan.promise(now_s, least_s, stretched_s)
        if self.pace is None and plan.chunks and self.policy.is_shared:
            return plan  # measure this step first, for the bounds of later steps
        in_turn = self._next(now_s, first) if self.waiting else []
        self._is_turn_of_short = not self._is_turn_of_short
        ahead: list[Sequence] = []
        if self._is_turn_of_short:
            prompts.sort(key=lambda waits: (self._class_of(waits), waits.pending))
            best = self._class_of(prompts[0]) if prompts else (True, math.inf)
            ahead = list(takewhile(lambda waits: self._class_of(waits) <= best, in_turn))
        may_admit = self._admit(plan, ahead, now_s)
        left = [*prompts, *held]
        for sequence in left:
            if sequence.pending == 1:
                break
            if self.prefixes is not None:
                self.prefixes.find(sequence)
            tokens = self._chunk(plan, sequence)
            if tokens and self._has_pages(sequence, tokens, left):
                self._run(plan, sequence, tokens)
        if may_admit:
            self._admit(plan, in_turn[len(ahead) :], now_s)
        if self.pace is not None:
            read = plan.tokens - plan.decoded.tokens
            self._most_read = max(self._most_read, _GROWTH * read)
        return plan

    def _class_of(self, sequence: Sequence) -> tuple[bool, float]:
        """Return the sort key that precedes prompt length: heavy tenants last, then priority."""
        is_heavy = self._bound is not None and self._bound.applies(sequence)
        return is_heavy, sequence.request.priority

    def launched(self, plan: Plan) -> None:
        """Note that a plan's step was launched."""
        self.policy.served(plan.chunks)
        if self.prefixes is not None and self.prefixes.snapshots is not None:
            self.prefixes.snapshots.launched()

    def plan_alone(self, sequence: Sequence, now_s: float) -> Plan:
        """Plan a step of a single sequence; the plan is empty without room."""
        plan, self._bound = Plan(), None
        if sequence in self.waiting:
            self._admit(plan, [sequence], now_s)
        elif sequence in self.running:
            tokens = self._chunk(plan, sequence)
            if tokens and self._has_pages(sequence, tokens, [sequence]):
                self._run(plan, sequence, tokens)
        return plan

    def _has_pages(self, sequence: Sequence, tokens: int, left: list[Sequence]) -> bool:
        """Give a sequence pages for its next tokens; return False if the sequence was preempted.

        While pages are lacking, sequences are preempted from the end of `left`, at most down to the
        sequence itself.
        """
        table, end = sequence.table, sequence.cached + tokens
        assert table is not None
        if end <= len(table.pages) * PAGE_TOKENS:
            return True
        need = pages_for(end) - len(table.pages)
        while need > self.pool.free and not self.adapters.make_room(need):
            latest = left.pop()
            self._preempt(latest)
            if latest is sequence:
                return False
        self.pool.extend(table, need)
        return True

    def _run(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        if self._bound is not None:
            self._bound.note(sequence, tokens)
        plan.add(sequence, tokens)
        if self.prefixes is not None:
            self.prefixes.keep(sequence, tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self._put_back(sequence)
        self._note(Kind.PREEMPTED, sequence.id)

    def _give_way(self) -> Sequence | None:
        """Preempt requests, as the policy allows, for the next request, which had no room.

        Returns:
            The request, to be admitted first; None without such a request or preemption.
        """
        blocked, self._blocked = self._blocked, None
        if blocked not in self.waiting:
            return None
        gave_way = False
        while not self._has_room(blocked):
            other = self.policy.gives_way(blocked, self.running)
            if other is None:
                return None
            self._preempt(other)
            gave_way = True
        return blocked if gave_way else None

    def _has_room(self, sequence: Sequence) -> bool:
        running = len(self.running)
        return running < self.limits.running and self._room.holds(sequence, running)

    def _put_back(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._free(sequence)
        sequence.state = State.WAITING
        self.waiting[sequence] = None
        self.backlog.add(sequence)
        self.policy.put_back(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._room.take_back(sequence)
        self.adapters.release(sequence.request.adapter)

    def _chunk(self, plan: Plan, sequence: Sequence) -> int:
        """Return the number of tokens of a prompt that fit into the step."""
        room = self.limits.tokens - plan.tokens
        least, forward = min(self.limits.least_chunk, self.limits.tokens), self.pace
        if self.forward is None and self.limits.prompt_stretch < math.inf:
            room = min(room, self._most_read - (plan.tokens - plan.decoded.tokens))
        if forward is not None and plan.is_late:
            room = min(room, 0 if plan.has_prompts else least)
        elif forward is not None and min(plan.gap_s, plan.stretched_s) < math.inf:
            promised_s = forward.reserve.within(plan.gap_s)
            beside = sequence.cached, plan.load + _LAST_ROW
            most_s = min(promised_s, plan.stretched_s)
            fitting = forward.tokens_within(most_s, *beside, are_read=sequence.reads)
            if not plan.has_prompts:
                # Without SLOs, prompts always make progress.
                least, fitting = 1, max(fitting, int(plan.gap_s == math.inf))
            room = min(room, fitting)
        if self._bound is not None and self._bound.applies(sequence):
            room, least = self._bound.chunk(plan, sequence, room), 1
        return 0 if room < min(least, sequence.pending) else min(sequence.pending, room)

    def _next(self, now_s: float, first: Sequence | None) -> List[Sequence]:
        """Return the sequences to admit, `first` and then in the policy's order; prefetch adapters.

        While sequences run, a request waits until its adapter is copied, as the step would wait.
        """
        places = max(self.limits.running - len(self.running), 0)
        in_turn = self.policy.first(places + self.limits.prefetched, now_s, self.running)
        if first is not None:
            in_turn = [first, *(sequence for sequence in in_turn if sequence is not first)]
        ahead = self._room.bring_ahead(in_turn, len(self.running))
        if ahead:
            self._device.prefetch(ahead)
        if in_turn and not places:
            self._blocked = in_turn[0]
        if not self.running:
            return in_turn[:places]
        return [sequence for sequence in in_turn[:places] if not self._waits_for_adapter(sequence)]

    def _waits_for_adapter(self, sequence: Sequence) -> bool:
        adapter = sequence.request.adapter
        return adapter is not None and self._device.is_copying(adapter)

    def _admit(self, plan: Plan, in_turn: List[Sequence], now_s: float) -> bool:
        """Start requests while there is room; return False if a request had no room."""
        if not in_turn:
            return True
        tables = [other.table for other in self.running]
        reach = max([table.reach for table in tables if table is not None], default=0)
        for sequence in in_turn:
            if self._bound and self._bound.is_full and self._bound.applies(sequence):
                continue
            if self.prefixes is not None:
                self.prefixes.find(sequence)
            # A prompt runs whole, whatever its length, if the step has no other work and no bound.
            is_alone = not (self.running or (self._bound and self._bound.applies(sequence)))
            is_whole = is_alone and self.limits.prompt_stretch == math.inf
            tokens = sequence.pending if is_whole else self._chunk(plan, sequence)
            if tokens < sequence.pending and sequence is not in_turn[-1]:
                # Start the following requests as well, so that later steps can choose the shortest.
                tokens = max(tokens // 2, min(tokens, self.limits.least_chunk))
            expected = self._expected_pages(sequence, reach)
            if tokens < 1 or not self._room.give(sequence, len(self.running), expected):
                self._room.take_back(sequence)
                if not tokens and self._bound is not None and self._bound.applies(sequence):
                    continue  # requests of other tenants may still start
                self._blocked = sequence if tokens else None
                return False
            table = _table(sequence)
            reach = max(reach, table.reach)
            if sequence.blocks.restored >= 0:
                self._device.copy_states(sequence.blocks.restored, table.slot)
                sequence.blocks.restored = -1
            self._begin(sequence, now_s)
            plan.admitted.append(sequence)
            self._run(plan, sequence, tokens)
        return True

    def _expected_pages(self, sequence: Sequence, reach: int) -> int:
        """Return the pages to reserve for a sequence, equal for all sequences if possible.

        Attention runs sequences at equal strides in a single call. Reserved pages go to other
        sequences when no other page is free.
        """
        need = max(sequence.most_pages, reach)
        roomy = (len(self.running) + len(self.waiting)) * need <= self.pool.size
        return need if roomy else sequence.most_pages

    def check_integrity(self) -> None:
        """Raise an AssertionError if a page is lost or held twice, or a sequence is misplaced."""
        self.pool.check_integrity()
        self.adapters.check_integrity()
        if self.prefixes is not None:
            self.prefixes.check_integrity()
        assert self.waiting.keys() == self.policy.waiting()
        assert self.backlog.requests == sum(map(new_requests, (*self.waiting, *self.preparing)))
        assert self.most_pages == max((*map(self._room.most_of, self.everyone), 0))
        for sequence in self.waiting:
            assert sequence.state is State.WAITING
            assert sequence.table is None
            assert not sequence.cached
            assert sequence.length == sequence.request.length + len(sequence.generated)
        for sequence in self.running:
            table = _table(sequence)
            assert sequence.state is State.RUNNING
            assert table.capacity >= sequence.cached
            assert table.shared * PAGE_TOKENS <= sequence.cached
            assert sequence.length - sequence.ahead == sequence.request.length + len(
                sequence.generated
            )


def _admitted_first(sequence: Sequence) -> tuple[float, int, int]:
    admitted_s = sequence.times.admitted_s
    first_s = math.inf if admitted_s is None else admitted_s
    return first_s, sequence.number, sequence.choice


def _table(sequence: Sequence) -> PageTable:
    assert sequence.table is not None
    return sequence.table
