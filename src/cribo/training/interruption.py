"""Signal handling: an interrupted run saves a checkpoint and ends after the same step on all ranks."""

import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from cribo.base.errors import Interrupted
from cribo.base.machine import is_first_process

log = logging.getLogger("cribo")

# SLURM sends SIGUSR1 before the time limit (`--signal=USR1@90`). It does not exist on Windows.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interruption(L.Callback):
    """Callback that ends training after the step in which any rank received a signal.

    The first SIGINT, SIGTERM or SIGUSR1 saves a checkpoint at the end of the step; after SIGUSR1, a SLURM job is also
    requeued. A second SIGINT or SIGTERM ends the process immediately. Lightning's own handlers would save in the middle
    of a step; Lightning restores all previous handlers at the end.

    A validation after the training ends after its current batch, on each rank separately, without saving.

    Args:
        save: function that writes the checkpoint.
        advice: how to resume, for the message.
    """

    def __init__(self, save: Callable[[L.Trainer], None], *, advice: str) -> None:
        self.save = save
        self.advice = advice
        self._received = 0
        self._group: Any = None
        self._agreement: tuple[torch.Tensor, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the handlers."""
        if trainer.world_size > 1:
            # A separate group on the host, so that no rank waits for a GPU to know whether to continue.
            self._group = dist.new_group(backend="gloo")
        self._listen()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the handlers for a validation outside the training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._listen()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start exchanging the signals received so far, in parallel with the step."""
        if self._group is not None:
            received = torch.tensor(self._received)
            work = dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._agreement = received, work

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop if a signal was received.

        Raises:
            Interrupted: SIGTERM or SIGUSR1 was received.
            KeyboardInterrupt: SIGINT was received.
        """
        number = self._received
        if self._agreement is not None:
            received, work = self._agreement
            work.wait()
            number = int(received)
        if number and trainer.global_step >= trainer.max_steps:  # training ends anyway, a validation after it does not
            self._received = number
        elif number:
            self.save(trainer)
            self._end(trainer, number)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop a validation outside the training if a signal was received."""
        if trainer.state.fn == TrainerFn.VALIDATING and self._received:
            self._end(trainer, self._received)

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number
        if number in (signal.SIGINT, signal.SIGTERM):
            # The default handlers end the process at the second signal, even outside Python code.
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
        if number == signal.SIGINT:
            # Not print or logging, which the signal may have interrupted. Progress bars hide the cursor: show it.
            cursor = b"\x1b[?25h" if os.isatty(2) else b""
            os.write(2, cursor + b"\nstopping after this step; press Ctrl-C again to stop immediately\n")

    def _end(self, trainer: L.Trainer, number: int) -> None:
        received = signal.Signals(number)
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        if trainer.is_global_zero and received.name == "SIGUSR1":
            requeue()
        raise Interrupted(received, trainer.global_step, self.advice)


@contextmanager
def interrupted_by_signals(advice: str) -> Iterator[None]:
    """Raise `Interrupted` at SIGTERM or SIGUSR1, outside the training, which has its own handlers.

    After SIGUSR1, a SLURM job is requeued. No-op in other threads than the main one.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received.name == "SIGUSR1" and is_first_process():
            requeue()
        raise Interrupted(received, None, advice)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in _SIGNALS if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def requeue() -> None:
    """Requeue this SLURM job; no-op outside SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if job is None:
        return
    if not re.fullmatch(r"\d+(_\d+)?", job):
        log.error("could not requeue the job: SLURM's job id must be a number, got %r", job)
        return
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.error("could not requeue job %s: %s", job, str(reason).strip())
    else:
        log.info("requeued job %s", job)
