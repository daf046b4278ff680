"""Replacements for the vLLM server of TRL 1.16's `AsyncGRPOTrainer`.

Versions are those of the run and come from the trainer's ``global_step``, which a checkpoint
keeps: TRL's own count begins again when training is resumed.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from roles.trl.run import POLL, SwarmRun

try:
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from torch import Tensor
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ImportError as error:
    raise ImportError(f"roles.trl needs TRL: pip install 'shoal[trl]' ({error})") from error

_KNOWN: Final = {
    "loss": "loss",
    "kl": "k3",
    "entropy": "entropy",
    "grad_norm": "gradient_norm",
    "clip_ratio/region_mean": "clipped",
    "clip_ratio/low_mean": "clipped_low",
    "clip_ratio/high_mean": "clipped_high",
    "ratio": "ratio_mean",
    "ratio_max": "ratio_max",
    "learning_rate": "learning_rate",
}
"""What of TRL's log is reported, and as what."""


def arguments(run: SwarmRun, *, rows: int | None = None, updates: int = 1) -> dict[str, Any]:
    """Return the arguments of `AsyncGRPOConfig` that the run decides.

    Args:
        run: Says how many answers a step has, and how they were drawn.
        rows: Answers that are forwarded together (all of an update).
        updates: Optimiser updates of one step of the run, each from other groups.

    Raises:
        ValueError: An update would not have as many answers as another.
    """
    each, left = divmod(run.rows, updates)
    accumulation, rest = divmod(each, rows or each)
    if left or rest:
        raise ValueError(
            f"a step has {run.rows} answers: {updates} updates of micro-batches of"
            f" {rows or each} do not divide them"
        )
    has_gpu = torch.cuda.is_available()
    return {
        "max_steps": (run.steps - run.first) * updates,
        "per_device_train_batch_size": rows or each,
        "gradient_accumulation_steps": accumulation,
        "weight_sync_steps": updates,
        "temperature": run.task["temperature"],
        "token_budget": 0,
        "max_staleness": 10**9,  # the node sees to it: what it hands out is learnt
        "logging_steps": updates,
        "report_to": [],
        "bf16": has_gpu,
        "use_cpu": not has_gpu,
    }


class SwarmRollouts:
    """A rollout worker whose rollouts come from the run's volunteers, scored by the node."""

    def __init__(self, run: SwarmRun) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._run = run
        self._failure: Exception | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Called after the first weights."""
        threading.Thread(target=self._feed, name="swarm-rollouts", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def update_model_version(self, model_version: int) -> None:
        """TRL's own count, which is not the run's."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the feeding task. Silence of volunteers is no failure."""
        if self._failure is not None:
            raise self._failure

    def _feed(self) -> None:
        run = self._run
        step = run.step + 1
        try:
            while not self._ended.is_set():
                run.greet()
                groups = run.groups(step) if step <= run.steps else None
                if groups is None:
                    self._ended.wait(POLL)
                    continue
                numbered = list(enumerate(groups))
                random.Random(step).shuffle(numbered)
                for number, group in numbered:
                    for row in group:
                        self.rollout_buffer.put(
                            RolloutSample(
                                prompt=[],
                                completion=[],
                                input_ids=row.ids.astype("int64"),
                                completion_mask=row.mask.astype("int64"),
                                old_log_probs=row.logprobs,
                                advantage=row.advantage,
                                model_version=step,
                                group_id=step * len(groups) + number,
                                metrics={"reward": row.reward},
                            )
                        )
                step += 1
        except Exception as error:  # noqa: BLE001 - raised again in TRL's own thread
            self._failure = error


class SwarmWeights:
    """A weight transfer: full tensors, adapters merged, into the run's folder."""

    def __init__(self, run: SwarmRun) -> None:
        self._run = run

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Write the version of the step that has just ended, unless it is published already."""
        run = self._run
        dtype = getattr(torch, run.task["dtype"])
        is_wanted = run.wants(run.step)
        # The iterator is always consumed: other processes take part in each tensor.
        weights = {
            name: weight.detach().to("cpu", dtype, copy=True).contiguous()
            for name, weight in iterator
            if is_wanted
        }

        def save(path: Path) -> None:
            save_file(weights, path, metadata={"format": "pt"})

        run.publish(run.step, save)


class SwarmCallback(TrainerCallback):
    """Counts the run's steps, and reports figures and checkpoints to the node."""

    def __init__(self, run: SwarmRun) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.logging_steps != args.weight_sync_steps:
            raise ValueError(
                "logging_steps must be weight_sync_steps, so that each step of the run is"
                " reported: take both from roles.trl.arguments"
            )
        self._run.step = self._run.written = self._step(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the weights are sent."""
        self._run.step = self._step(args, state)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any
    ) -> None:
        """After the weights were sent."""
        if "loss" in logs:
            numbers = {ours: logs[name] for name, ours in _KNOWN.items() if name in logs}
            self._run.report(
                self._run.step,
                {name: float(one) for name, one in numbers.items() if math.isfinite(one)},
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.weight_sync_steps == 0:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._run.note_checkpoint(self._step(args, state), folder)

    def _step(self, args: Any, state: Any) -> int:
        return self._run.first + int(state.global_step) // int(args.weight_sync_steps)


class ExactTrainer(AsyncGRPOTrainer):
    """An `AsyncGRPOTrainer` that takes exactly the rollouts of one step from the swarm.

    TRL's own loader is one micro-batch ahead: of a step of which every answer was handed out it
    would wait for an answer of the next, and that one is drawn with this step's weights.
    """

    def __init__(self, run: SwarmRun, *, callbacks: Any = (), **given: Any) -> None:
        """``given`` are the arguments of `AsyncGRPOTrainer`, except those that the swarm
        replaces."""
        if not torch.cuda.is_available():
            from roles.trl.cpu import run_on_cpu

            run_on_cpu()
        super().__init__(
            model=run.model,
            train_dataset=Dataset.from_dict({"prompt": ["unused"]}),
            rollout_worker=SwarmRollouts(run),
            weight_transfer=SwarmWeights(run),
            callbacks=[SwarmCallback(run), *callbacks],
            **given,
        )
        if self.accelerator.num_processes > 1:
            raise ValueError("ExactTrainer is one process: start it without accelerate launch")

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        """Note the largest ratio as well, which the node watches and TRL does not log."""
        seen: list[Tensor] = []
        hook = model.register_forward_hook(
            lambda _model, _inputs, outputs: seen.append(outputs.log_probs.detach().flatten())
        )
        try:
            loss = super().compute_loss(model, inputs, *args, **named)
        finally:
            hook.remove()
        taken = inputs["token_index"] >= 0
        grown = seen[-1][inputs["token_index"][taken]] - inputs["old_log_probs"][taken]
        largest = math.exp(min(float(grown.max()), 700))
        self._metrics["train"]["ratio_max"].append(largest)  # TRL reports the largest of *_max
        return loss

    def get_train_dataloader(self) -> Any:
        prepare = self.accelerator.prepare
        self.accelerator.prepare = lambda loader: loader
        try:
            return super().get_train_dataloader()
        finally:
            self.accelerator.prepare = prepare
