"""`Optimizer.apply_gradients`: how one step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstrat._calls.records import signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, ReduceOp
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers import _composition, _gradients
from hpcstrat.optimizers._state import OptimizerState, plan_key


def apply_as_before(
    optimizer: Any, pairs: Sequence[tuple[Any, Variable]], are_summed: bool
) -> bool:
    """The fast path: arrays in a replica, known variables, no step that transforms them.

    It only leaves out checks whose outcome is known. Returns `False`, and has done nothing, for
    any other step.
    """
    context = contexts.current.get()
    state: OptimizerState = optimizer._state
    if are_summed or type(context) is not InReplica or optimizer._transforming:
        return False
    group = context.group
    try:
        gradients, variables = zip(*pairs, strict=True)
    except (TypeError, ValueError):  # not pairs
        return False
    plan = state.plans.get((id(group), *map(id, variables)))  # inlines `plan_key`
    if plan is None or not plan.fits(gradients):
        return False
    rate = optimizer._constant_rate
    try:
        rate = float(optimizer._rate_after(state.iterations)) if rate is None else rate
        rule = optimizer.update_rule(rate, state.iterations + 1)
    except Exception:  # the slow path gets it too, and raises it on all ranks
        return False
    try:
        group.storage.update(plan, gradients, ReduceOp.SUM, rule)
        state.iterations += 1
    except BaseException as error:  # a signal's may come between these two lines
        group.storage.mark_interrupted(error, plan.order.blocks)
        raise
    return True


def apply(optimizer: Any, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> None:
    """Any step: checks the gradients, sums them over the replicas, clips them, and updates."""
    _gradients.check_pairs(pairs)
    if not pairs:
        contexts.group().communicator.exchange(signature_of(current_call(), "no variable"))
        return
    group = _gradients.group_of_variable(pairs[0][1], "to")
    state: OptimizerState = optimizer._state
    with group.communicator.raise_together():
        gradients, dense, sparse = _gradients.prepare_pairs(pairs)
        variables = [*dense, *(v for _, v in sparse)]
        if not variables:
            _gradients.refuse_no_gradient(group, len(pairs))
        if sparse or plan_key(group, dense) not in state.plans:
            _gradients.check_variables(group, variables)
        rate = float(optimizer._rate_after(state.iterations))
        step, clipped = state.iterations + 1, optimizer._formula_of_clipped
        clipping = optimizer._clipping if sparse else []  # rows are clipped before the update
        rule = (
            clipped.rule(optimizer, rate, step) if clipping else optimizer.update_rule(rate, step)
        )
        _gradients.check_norms(rule, sparse)
    are_summed = are_summed or not isinstance(contexts.context(), InReplica)
    if are_summed:
        group.communicator.require_equal(gradients)
    rows = [_gradients.sum_rows(group, slices, v, are_summed) for slices, v in sparse]
    if steps := optimizer._transforming or clipping:
        if not are_summed:
            gradients = group.communicator.all_reduce(gradients, ReduceOp.SUM)
            are_summed = True
        gradients, rows = _composition.transform(
            optimizer, steps, group, variables, gradients, rows
        )
    try:  # all variables and the number of steps change, or nothing does
        if dense:
            plan = state.plan_of(group, dense, optimizer.name, optimizer.all_slots)
            op = FIRST_REPLICA if are_summed else ReduceOp.SUM
            group.storage.update(plan, gradients, op, rule)
        for (_, v), (indices, values) in zip(sparse, rows, strict=True):
            state.make_slots([v], optimizer.name, optimizer.all_slots)
            slots = state.slots[id(v)][1]
            group.storage.update_rows(state_of(v).block, slots, indices, values, rule)
        state.iterations += 1
    except BaseException as error:
        group.storage.mark_interrupted(error, [state_of(v).block for v in variables])
        raise
