"""Storage in host memory: one copy of the variables on each host, for all its ranks."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import final

import numpy as np

from hpcstrat._agreement.agreement import Write
from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import ByteRange, ElementRange
from hpcstrat._memory.shards import merge
from hpcstrat._memory.shared_file import share_slab
from hpcstrat._memory.slabs import GPU_ALIGNMENT, Slabs, allocate_on_gpu, allocate_private, part
from hpcstrat._process import settings
from hpcstrat._process.heap import keep_freed_memory
from hpcstrat._storage.base import Storage
from hpcstrat._storage.gpu_plan import GpuPlan, MessageMemory
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.parts import PART, fill, flat, writer_of
from hpcstrat._storage.plan import Buffers, Plan
from hpcstrat._transports.device import DeviceCommunicator
from hpcstrat._transports.host import HostCommunicator
from hpcstrat._transports.slices import SlicingCommunicator
from hpcstrat._transports.verbs import Communicator
from hpcstrat._update import compiled
from hpcstrat._update.host_update import HostUpdate, Scratch
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import NOTHING_IN_PLACE, InPlace


@final
class HostStorage(Storage):
    """One copy for all ranks of a host, in memory that they share.

    An update is cooperative: each rank leaves its gradients in its mailbox; after a barrier each
    rank reduces and updates its slice of the elements, chunk by chunk while they are in cache;
    after another barrier all read the new values. Of several hosts each has a copy: a slice is
    summed on its host and then between the hosts, before its rank on each host updates it. A rank
    that an exception stops in between does not reach the second barrier, so that no rank reads
    variables that are changed in part.

    Ranks that compute on GPUs, all of one host, each have a copy to read on their GPU. Their
    gradients travel as one message, and new values are copied from the host.

    Args:
        communicator: the ranks.
        stream: the stream of this rank's GPU; `None` if it computes on the CPU.
    """

    def __init__(self, communicator: Communicator, stream: gpu.Stream | None = None) -> None:
        keep_freed_memory()  # here, where a program begins to make gradients on the host
        super().__init__(communicator, stream)
        is_device = isinstance(communicator, DeviceCommunicator)
        control = communicator.control if is_device else communicator
        assert isinstance(control, HostCommunicator)
        self._control = control
        # The same, if other ranks share this host's memory; each updates a slice then.
        self._slicing = slicing = control if isinstance(control, SlicingCommunicator) else None
        self._alignment = 1 if stream is None else GPU_ALIGNMENT
        self._reads_in_place = slicing is not None and slicing.hosts == 1 and stream is None
        # Of each plan what is copied after it: to the GPU, from the host.
        self._copies: weakref.WeakKeyDictionary[Plan, list[tuple[Array, Array]]]
        self._copies = weakref.WeakKeyDictionary()
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._message = np.empty(0, np.uint8)  # of a rank alone
        allocate = allocate_private
        if slicing is not None:
            allocate = functools.partial(share_slab, slicing.mailboxes.comm)
            self.copies, self.writes_here = slicing.hosts, slicing.mailboxes.rank == 0
        # Without a limit, or a large model would have too many files; but each is small beside the
        # others: what a program drops stays in memory until all of its slab is dropped.
        slabs = functools.partial(Slabs, alignment=self._alignment, largest=1 << 40, share=8)
        self._variables, self._slots = slabs(allocate), slabs(allocate)
        if stream is None:
            self._own = slabs(allocate_private)
        else:
            self._messages = MessageMemory(stream)
            self._own = Slabs(functools.partial(allocate_on_gpu, stream), alignment=self._alignment)
        self._compiles = settings.is_on("HPCSTRAT_COMPILE")
        self._scratch: Scratch = {}
        # Several threads may write variables made outside every scope; the scratch memory and the
        # plans are shared.
        self._lock = threading.Lock()

    # ---- blocks

    def _create(self, initial: Array, per_replica: bool) -> Block:
        communicator, stream = self.communicator, self.stream
        with communicator.raise_together():
            if stream is not None:
                stream.refuse_in_graph("a new variable")
            slabs = self._own if per_replica else self._variables
            block = slabs.new_block(initial.shape, initial.dtype)
            if stream is not None and not per_replica:
                block.copy = self._own.new_block(initial.shape, initial.dtype)
                # Programs on this rank compute with the copy, never with the master.
                block.view = block.copy.view
            if per_replica or self.writes_here:
                self.write(block, initial, UpdateRule())
            communicator.exchange(signature_of(f"{current_call()}: memory"))
        if per_replica and stream is not None:
            assert isinstance(communicator, DeviceCommunicator)
            with stream.current():
                communicator.broadcast_flat(block.array.reshape(-1), 0)
        elif per_replica:
            self._send_first(block.array, receives=True)
        else:
            self._send_between_hosts([block])
            self.refresh([block])
        return block

    def _create_slot(self, variable: Block, value: float) -> Block:
        with self.communicator.raise_together():
            array = variable.array
            block = self._slots.new_block(array.shape, array.dtype)
            if self.writes_here:
                block.array[...] = array.dtype.type(value)
            self.communicator.exchange(signature_of(f"{current_call()}: memory"))
        return block

    def _send_between_hosts(self, blocks: Sequence[Block]) -> None:
        """Copies blocks of the first host to all others. Collective."""
        if self._slicing is not None and self.copies > 1:
            for block in blocks:
                self._send_first(block.array, self.writes_here)
            self._slicing.sync()  # the first rank of each host writes for the others

    def _send_first(self, array: Array, receives: bool) -> None:
        """Copies rank 0's array to the arrays of ranks that receive it, part by part."""
        control, whole = self._control, flat(array)
        if control.size == 1:
            return
        for here in ByteRange(0, whole.size).split(PART):
            own = whole[here.slice]
            signature = signature_of(f"{current_call()}: value", here.start)
            if control.rank == 0:
                control.exchange(signature, own.size, writer_of(own))
            else:
                sent = control.exchange(signature)[0]
                if receives:
                    own[...] = sent[: own.size]

    def publish(self, blocks: Sequence[Block]) -> None:
        """See `Storage.publish`. On one host all ranks read what is written."""
        for block in blocks:
            block.checksum = None
        if blocks and (self.copies > 1 or self.stream is not None):
            self.communicator.exchange(
                signature_of(current_call(), "publish", *[block.identity() for block in blocks])
            )
            self._send_between_hosts(blocks)
            self.refresh(blocks)

    # ---- plans

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates, with this rank's slice of the elements."""
        slicing = self._slicing
        order = MessageOrder(variables, slots, self._alignment)
        own, rank = order.shards, 0
        if slicing is not None:
            rank = slicing.mailboxes.rank
            own = order.shards_of_rank(rank, slicing.slices)
        is_large = sum(order.layout.sizes) >= compiled.FEWEST
        after = 0 if is_large else compiled.FEWEST_UPDATES
        after = after if self._compiles else math.inf
        update = HostUpdate(
            part, own, self._scratch, rank, after, slicing is not None, self._alignment
        )
        if self.stream is None:
            plan = Plan(order, update)
        else:
            plan = GpuPlan(order, update, self.stream)
            # Variables that lie in a row in both memories are copied by one call.
            places = [(block.copy.memory, block.memory) for block in order.blocks if block.copy]
            merged = merge(sorted(places), GPU_ALIGNMENT)
            self._copies[plan] = [(part(*copy), part(*master)) for _, (copy, master) in merged]
        with self._lock:  # another thread may be going through the plans
            (self._plans if slicing is None else slicing.mailboxes.readers).add(plan)
        return plan

    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers in memory that the ranks of a host share, or on this rank's GPU."""
        communicator, nbytes = self.communicator, plan.order.layout.nbytes
        communicator.exchange(plan.signature())  # the ranks make the memory together
        with communicator.raise_together():
            if (stream := self.stream) is not None:
                with stream.current():
                    plan.attach(self._messages.allocate(nbytes))
                messages, own = [plan.memory], plan.memory
            elif self._slicing is not None:
                boxes = self._slicing.mailboxes
                messages = boxes.allocate(nbytes)
                own = messages[boxes.rank]
            else:
                own = np.zeros(nbytes, np.uint8)
                messages = [own]
            communicator.exchange(plan.signature())
        plan.buffers = Buffers(plan.order, messages, own)

    # ---- updates

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        control, update, layout = self._slicing, plan.update, plan.order.layout
        assert isinstance(update, HostUpdate)
        if control is None:
            self._update_alone(signature, plan, values, rule)
            return
        add_up = None if rule.clip is None else control.add_up
        if op is FIRST_REPLICA:
            write = self._writer(plan, values) if control.rank == 0 else None
            first = control.exchange(signature, layout.nbytes if write else 0, write)[:1]
            update.run(rule, first, add_up=add_up)
        else:
            in_place = NOTHING_IN_PLACE
            if values is not None and self._reads_in_place and update.may_be_in_place:
                # No other rank needs this rank's part of a large gradient.
                in_place = update.in_place(values)
            write = self._writer(plan, values, in_place)
            buffers = plan.buffers if values is None and self.stream is None else None
            shared = buffers.messages if buffers else ()
            messages = control.exchange_slices(signature, layout, op, write, shared)
            update.run(rule, messages, op, in_place, add_up=add_up)
        # Until all have written, a read could see both new and old elements.
        control.sync()
        if self.stream is not None:
            self._copy_to_gpu(plan)

    def _update_alone(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        rule: UpdateRule,
    ) -> None:
        """The update of a rank that has no others."""
        update, in_place = plan.update, NOTHING_IN_PLACE
        assert isinstance(update, HostUpdate)
        with self._lock:
            # There is no other rank to exchange with, but the call is counted, and refused where no
            # call is allowed.
            self._control.exchange(signature)
            if self._message.size < plan.order.layout.nbytes:
                self._make_message(plan.order.layout.nbytes)
            message = self._message
            if self.stream is not None:
                self._writer(plan, values)(message)
            elif values is not None:
                in_place = update.in_place(values)  # large gradients are not copied
                plan.write(message, values, in_place)
            elif plan.buffers is not None:
                message = plan.buffers.own
            update.run(rule, [message], in_place=in_place)
        if self.stream is not None:
            self._copy_to_gpu(plan)

    def _copy_to_gpu(self, plan: Plan) -> None:
        assert self.stream is not None
        with self.stream.current():
            for copy, master in self._copies[plan]:
                fill(copy, master)

    def _make_message(self, nbytes: int) -> None:
        """Makes the message of a rank alone, for all plans: updates follow one another."""
        for plan in self._plans:
            plan.forget_messages()
        self._message = np.empty(0, np.uint8)
        is_pinned = self.stream is not None
        self._message = gpu.allocate_pinned(nbytes) if is_pinned else np.empty(nbytes, np.uint8)

    def _writer(
        self, plan: Plan, values: Sequence[Array] | None, in_place: InPlace = NOTHING_IN_PLACE
    ) -> Write:
        """What writes this rank's gradients, or new values, as a message in host memory."""
        if isinstance(plan, GpuPlan):
            stream = plan.stream
            with self.communicator.raise_together(), stream.current():
                stream.refuse_in_graph("an update of variables in host memory")
                if plan.memory is None:
                    self._messages.lend(plan)
                if values is not None:
                    plan.pack(values)

            def write(message: Array) -> None:
                with stream.current():
                    plan.message.get(out=message[: plan.message.size])

            return write
        if values is not None:
            return functools.partial(plan.write, values=values, in_place=in_place)
        assert plan.buffers is not None
        return writer_of(plan.buffers.own)

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        """Each rank of a host updates its share of the rows."""
        slicing, copy = self._slicing, blocks[0].copy
        arrays = [block.array for block in blocks]
        here, gradient = gpu.to_host(rows), gpu.to_host(gradient)
        # Rows are all different, so ranks that update different rows never touch the same memory.
        if slicing is None:
            update_rows(arrays, here, gradient, rule)
        else:
            boxes = slicing.mailboxes
            share = ElementRange(0, len(here)).of_rank(boxes.rank, boxes.size).slice
            update_rows(arrays, here[share], gradient[share], rule)
            slicing.sync()
        if copy is not None:  # only the new rows travel to the GPU
            assert self.stream is not None
            with self.stream.current():
                copy.array[self.stream.here(rows)] = self.stream.here(arrays[0][here])
