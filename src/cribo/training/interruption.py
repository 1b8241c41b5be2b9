"""Signals: a run that is told to stop ends with a checkpoint, on all processes after the same step."""

import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from cribo.errors import Stopped

log = logging.getLogger("cribo")

# SIGUSR1 is what SLURM is asked to send before the time is up (`--signal=USR1@90`); Windows does not know it.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


_SECONDS_TO_END = 2.0  # for a process that can end by itself


class Interrupted(Stopped):
    """A signal ended the training, which can be resumed.

    Attributes:
        signal: which one.
        status: what a shell reports for a program that it ended: 128 and its number.
    """

    everywhere = True

    def __init__(self, received: signal.Signals, step: int, advice: str) -> None:
        super().__init__(f"stopped by {received.name} after step {step}: {advice}")
        self.signal = received
        self.status = 128 + received


class Interruption(L.Callback):
    """Ends the training after the step in which a signal came, whichever process it came to.

    The first SIGINT, SIGTERM or SIGUSR1 asks for a checkpoint at the end of the step; a second SIGINT or SIGTERM ends
    at once, even while a step hangs. After SIGUSR1 a job of SLURM is put into the queue again. Lightning's own
    handlers, which save where they are in the step, are replaced while the training lasts.

    A validation by itself, after the training, is ended after the batch in which SIGTERM or SIGUSR1 came, by each
    process for itself: there is nothing to save. Lightning would take the first for Ctrl-C, and not know the second.

    Args:
        save: writes the checkpoint.
        advice: how to go on, for the message.
    """

    def __init__(self, save: Callable[[L.Trainer], None], *, advice: str) -> None:
        self.save = save
        self.advice = advice
        self._received: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._impatience: _Impatience | None = None
        self._group: Any = None
        self._agreement: tuple[torch.Tensor, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen."""
        if trainer.world_size > 1:
            # On the host, beside the devices' own group: nobody waits for a GPU to learn whether to go on.
            self._group = dist.new_group(backend="gloo")
        self._listen(_SIGNALS)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Ask all processes; they answer while the step is taken."""
        if self._group is not None:
            told = torch.tensor(int(self._received or 0))
            self._agreement = told, dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, if a signal has come.

        Raises:
            Interrupted: a signal has come, and the checkpoint is written.
        """
        number = int(self._received or 0)
        if self._agreement is not None:
            told, work = self._agreement
            work.wait()
            number = int(told)
        if not number:
            return
        if trainer.global_step >= trainer.max_steps:  # it ends anyway; a validation that follows is ended
            self._received = signal.Signals(number)
            return
        self.save(trainer)
        self._end(trainer, signal.Signals(number))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the signals to who had them."""
        self._restore()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen, where there is no training around it; Ctrl-C is left to Python."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._listen([number for number in _SIGNALS if number != signal.SIGINT])

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop, if a signal has come and there is no training around it.

        Raises:
            Interrupted: a signal has come.
        """
        if trainer.state.fn == TrainerFn.VALIDATING and self._received is not None:
            self._end(trainer, self._received)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the signals to who had them, unless a training goes on."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the signals to who had them."""
        self._restore()

    def _listen(self, signals: Iterable[signal.Signals]) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in signals}
            self._impatience = _Impatience()

    def _end(self, trainer: L.Trainer, received: signal.Signals) -> None:
        if trainer.is_global_zero and received.name == "SIGUSR1":
            requeue()
        raise Interrupted(received, trainer.global_step, self.advice)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._received is not None:
                raise KeyboardInterrupt
            # Not by print or logging: either may be at work in this very thread.
            os.write(2, b"\nsaving a checkpoint after this step; press Ctrl-C again to stop at once\n")
        self._received = self._received or signal.Signals(number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._impatience is not None:
            self._impatience.end()
            self._impatience = None


class _Impatience(threading.Thread):
    """Ends the process at the second SIGINT or SIGTERM, whatever it is waiting for.

    A handler in Python runs between two of its instructions. A process that waits for another one inside of a library
    gets to none, but the system writes the signal's number to this thread's socket.
    """

    def __init__(self) -> None:
        super().__init__(name="impatience", daemon=True)
        self._numbers, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self.start()

    def run(self) -> None:
        """Count."""
        counted = 0
        while number := self._numbers.recv(1)[0]:
            counted += number in (signal.SIGINT, signal.SIGTERM)
            if counted > 1:
                time.sleep(_SECONDS_TO_END)
                os._exit(128 + number)

    def end(self) -> None:
        """Leave the signals to who had them."""
        signal.set_wakeup_fd(self._before)
        self._written.send(b"\0")
        self.join()
        self._numbers.close()
        self._written.close()


def requeue() -> None:
    """Have SLURM start this job again; nothing happens outside of one."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if job is None:
        return
    if not re.fullmatch(r"\d+(_\d+)?", job):
        log.error("SLURM's job id %r is none: the job is not queued again", job)
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("could not queue job %s again: %s", job, error)
        return
    if done.returncode:
        log.error("could not queue job %s again: %s", job, (done.stderr or done.stdout).strip())
    else:
        log.info("job %s is queued again", job)
