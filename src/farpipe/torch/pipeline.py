"""A pipeline of torch's stages in any order, in place of torch's own schedules.

pipeline = farpipe.torch.Pipeline(stage, n_microbatches, loss_fn, plan="plan.json")
pipeline.step(x)                                    # first rank, as with Schedule1F1B
pipeline.step(target=target, losses=losses)         # last rank
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.distributed.pipelining.stage import _PipelineStageBase

from farpipe.core.errors import InputError
from farpipe.core.step import Schedule
from farpipe.engine.executor.evaluation import FIRST_TAG, forward_only
from farpipe.engine.executor.executor import Executor
from farpipe.engine.executor.peers import TensorPeers
from farpipe.engine.executor.staging import Staging
from farpipe.engine.stages.weight_grads import WeightGradStore
from farpipe.planning import Plan
from farpipe.torch.backend import farpipe_group
from farpipe.torch.order_changes import OrderChanges, from_first, shared_mesh
from farpipe.torch.orders import Agreed, Asked, agree
from farpipe.torch.records import Records
from farpipe.torch.stages import CalledStage, Microbatches, cut, from_lists
from farpipe.torch.works import as_torch, raised_as_torch

_STEPS_EACH: Final = 1 << 40
"""Numbers of steps that one pipeline has for its messages; those of the next one over the same group come behind."""


class Pipeline:
    """One rank's part of a pipeline: called like torch's schedules, run by farpipe's executor over its transport."""

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        *,
        plan: str | Path | Plan | None = None,
        method: str | None = None,
        group: Any = None,
        scale_grads: bool = True,
        run_dir: str | Path | None = None,
        replan: bool = False,
        stores: Sequence[WeightGradStore | None] = (),
    ) -> None:
        """Make the pipeline, on all ranks at the same time.

        `stage`: a ``PipelineStage`` or a module, or a list of them. `plan`: a file with a plan, whose order is taken;
        `method`: another order, by its name, or a search (``auto``), for the plan's step, or for equal stages without a
        plan. `group`: ranks of the pipeline, those of the stage otherwise; a group that has another backend gets one of
        "farpipe" beside it. With `scale_grads` gradients are divided by the number of microbatches, as torch does.
        `run_dir`: the first rank writes the figures of the steps there; needs a plan. With `replan` it also looks for a
        better order when steps are not as planned, and all ranks go over to it between two steps. `stores`: those of
        stages, in their order, whose weight gradients `defer` has put off already.

        ValueError, on all ranks, where they contradict each other or the plan.
        """
        with raised_as_torch():
            self._group = farpipe_group(group or _group_of(stage))
            number, transport = next(self._group.num_pipelines), self._group.transport
            asked = Asked(n_microbatches, plan, method, loss_fn is not None, run_dir is not None, replan)
            agreed = agree(asked, stage, transport, f"pipeline {number}")
            scale, last = 1 / n_microbatches if scale_grads else 1.0, agreed.problem.num_stages - 1
            self._stages = {
                number: CalledStage(module, number, number == last, loss_fn, scale, store)
                for (number, module), store in zip_longest(agreed.stages.items(), stores)
            }
        self._last = self._stages.get(last)
        self._count, self._trains, self._is_mean = n_microbatches, agreed.trains, scale_grads
        self._first_tag, self._num_steps = number * _STEPS_EACH, 0
        self._peers, self._device = TensorPeers(transport), _device_of(stage)
        self._staging = Staging(self._peers, self._peers.abort) if self._device.type == "cuda" else None
        self._make_executors(agreed.schedule)
        self._observe(agreed, Path(run_dir) if run_dir is not None and transport.rank == 0 else None)

    def _observe(self, agreed: Agreed, run_dir: Path | None) -> None:
        """Begin to record steps, and to look for other orders, where that is agreed on."""
        self._records, self._changes = None, None
        if agreed.records and agreed.plan is not None:
            arguments = agreed.plan, agreed.schedule, self._peers, self._device.type, run_dir
            self._records = Records(*arguments, replan=agreed.replans)
        if agreed.replans:
            watch = None if self._records is None else self._records.watch
            share = partial(from_first, shared_mesh(agreed.stages.values()))
            self._changes = OrderChanges(self._group.transport, self._first_tag, watch, share)
        if agreed.records or agreed.replans:
            self._group.before_end.append(self.close)

    def _make_executors(self, schedule: Schedule) -> None:
        self.schedule = schedule
        """Order of the steps, until it changes."""
        staging, messenger = self._staging, self._staging or self._peers
        self._training = Executor(
            schedule,
            self._stages,
            messenger,
            stage_done=lambda _, number: self._stages[number].end_actions(),
            stage_begins=lambda _, number: self._stages[number].begin_actions(),
            stamps=staging,
        )
        self._evaluating = Executor(forward_only(schedule), self._stages, messenger, stamps=staging)

    def step(self, *args: Any, losses: list[Any] | None = None, return_outputs: bool = True, **given: Any) -> Any:
        """Forward and backward of all microbatches, on all ranks; gradients are added to those of the parameters.

        Either a whole batch, cut along its first dimension: positional arguments on the rank of the first stage,
        keyword arguments for every stage that is here, `target` on the rank of the last; or as `arg_mbs`, `kwarg_mbs`
        and `target_mbs`, lists with an entry per microbatch. `loss_kwargs` go to the loss function. On the rank of the
        last stage `losses` is filled with those of the microbatches, and the whole output is returned unless
        `return_outputs` is False; elsewhere None is.

        ValueError for lists of another length, DistBackendError where another rank is lost or gave up.
        """
        with raised_as_torch():
            if not self._trains:
                raise InputError("step: the rank of the last stage has no loss_fn; give it one, or call eval")
            if not torch.is_grad_enabled():
                raise InputError("step needs gradients, and they are switched off here; call eval")
            microbatches = self._microbatches(args, keep_outputs=return_outputs, **given)
        return self._run(microbatches, losses, is_training=True)

    def eval(self, *args: Any, losses: list[Any] | None = None, return_outputs: bool = True, **given: Any) -> Any:
        """The forwards alone, without gradients; arguments and result as of `step`. Losses need targets."""
        with raised_as_torch():
            microbatches = self._microbatches(args, keep_outputs=return_outputs, **given)
        with torch.no_grad():
            return self._run(microbatches, losses, is_training=False)

    def _microbatches(
        self,
        args: tuple[Any, ...],
        *,
        keep_outputs: bool,
        target: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Microbatches:
        lists = arg_mbs, kwarg_mbs, target_mbs
        further: dict[str, Any] = {"loss_kwargs": loss_kwargs or {}, "keep_outputs": keep_outputs}
        if all(one is None for one in lists):
            return cut(self._count, args, kwargs, target, **further)
        if args or kwargs or target is not None:
            raise InputError("give a whole batch or lists of microbatches (arg_mbs, kwarg_mbs, target_mbs), not both")
        return from_lists(self._count, *lists, **further)

    def _run(self, given: Microbatches, losses: list[Any] | None, *, is_training: bool) -> Any:
        for stage in self._stages.values():
            stage.begin_step(given)
        begin_ns = self._peers.clock.now_ns()
        tag = self._first_tag + self._num_steps + (0 if is_training else FIRST_TAG)
        self._num_steps += 1
        try:
            if is_training:
                self._change_order()
            events = (self._training if is_training else self._evaluating).run(tag)
        except BaseException as error:
            self._give_up(error)
            raise as_torch(error) from None
        if self._records is not None and is_training:
            self._records.add(begin_ns, events, self._loss())
        return self._results(given, losses)

    def _give_up(self, error: BaseException) -> None:
        self._peers.abort(f"{type(error).__name__}: {error}")
        if self._records is not None:
            self._records.end_watch()

    def _change_order(self) -> None:
        """Go over to another order, where one was announced for this step."""
        schedule = None if self._changes is None else self._changes.begin()
        if schedule is not None:
            self._make_executors(schedule)
            if self._records is not None:
                self._records.order_from_now(schedule)

    def _results(self, given: Microbatches, losses: list[Any] | None) -> Any:
        """The last stage's output; its losses go to `losses`."""
        if self._last is None:
            return None
        if losses is not None:
            losses[:] = [self._last.losses[microbatch] for microbatch in sorted(self._last.losses)]
        if not given.keep_outputs:
            return None
        return merge_chunks([self._last.outputs[microbatch] for microbatch in range(self._count)], None)

    def _loss(self) -> float:
        """Loss of the step as its gradient has it; NaN on ranks without the last stage."""
        if self._last is None:
            return math.nan
        total = float(torch.stack([*self._last.losses.values()]).sum())
        return total / self._count if self._is_mean else total

    def close(self) -> None:
        """Write the figures of the run, on all ranks at the same time; `destroy_process_group` does it otherwise."""
        changes, self._changes = self._changes, None
        if changes is not None:
            changes.end()
        if self._records is not None:
            records, self._records = self._records, None
            records.close()


def _group_of(stage: Any) -> Any:
    """The process group that torch's stages were made with; None for the default one."""
    parts = stage if isinstance(stage, list | tuple) else [stage]
    return next((part.group for part in parts if isinstance(part, _PipelineStageBase)), None)


def _device_of(given: Any) -> torch.device:
    """Device on which stages compute: that of torch's stages, whose modules may still be without memory (meta), or that
    of the first parameter."""
    for part in given if isinstance(given, list | tuple | nn.ModuleList) else [given]:
        if isinstance(part, _PipelineStageBase):
            return torch.device(part.device)
        for parameter in part.parameters():
            return parameter.device
    return torch.device("cpu")
