import copy
import os
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.commands import Commands

from cribo.base.errors import FolderError, UnusableCheckpoint
from cribo.pretraining import PretrainConfig, pretrain
from cribo.pretraining.loading import dump_config
from cribo.training.checkpoints import (
    CHECKPOINT_FORMAT,
    AtomicCheckpointIO,
    check_checkpoint,
    checkpoint_files,
    resume_point,
)

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


def steps_of(run: Path, folder: str = "checkpoints") -> list[int]:
    return sorted(int(path.stem.partition("=")[2]) for path in (run / folder).iterdir())


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("could not save")]


# ------------------------------------------------------------------ kept checkpoints


def test_a_checkpoint_holds_the_weights_after_its_step(tiny: Tiny, train: Train) -> None:
    """The last step is saved with any interval, and only the last checkpoints are kept."""

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
            if trainer.global_step == 12:
                state = copy.deepcopy(pl_module.state_dict())
                self.bank = state.pop("_extra_state")["bank"]
                self.weights = state

    keep = Keep()
    trained = train(tiny({"runtime.checkpoint_every": 3, "runtime.keep_checkpoints": 3}), callbacks=[keep])
    assert steps_of(trained.run.folder) == [6, 9, 12]
    assert (trained.checkpoint["global_step"], trained.checkpoint["cribo"]["num_images"]) == (12, 36)
    assert trained.weights.keys() == keep.weights.keys()
    assert all(torch.equal(value, trained.weights[name]) for name, value in keep.weights.items())
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(trained.bank[n])) for n, value in keep.bank.items())


def test_a_folder_without_checkpoints_has_no_last_one(tmp_path: Path) -> None:
    assert checkpoint_files(tmp_path) == []
    assert resume_point(tmp_path) is None


def test_checkpoints_come_latest_first(tmp_path: Path) -> None:
    """Sorted by number, not by text: steps above 10^8 have one more digit."""
    folder = tmp_path / "checkpoints"
    names = ["step=00000002.ckpt", "step=99999999.ckpt", "step=100000000.ckpt"]
    others = ["step=00000008.ckpt.refused", "step=last.ckpt", ".step=00000009.ckpt.0123456789abcdef.part"]
    folder.mkdir()
    for name in names + others:
        (folder / name).touch()
    (folder / "step=00000077.ckpt").mkdir()
    assert [path.name for path in checkpoint_files(tmp_path)] == names[::-1]


def test_a_callback_state_that_cannot_be_restored_is_an_error_before_the_first_step(tiny: Tiny, train: Train) -> None:
    class Stateful(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"where": Path("a")}

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a step was taken")

    with pytest.raises(ValueError, match="callback Stateful"):
        train(tiny(), callbacks=[Stateful()])


# ------------------------------------------------------------------ failed saves


class ReplaceFolder(L.Callback):
    """Replaces the checkpoints' folder by a file at one step, and restores it at another."""

    def __init__(self, folder: Path, broken: int, mended: int) -> None:
        self.folder = folder
        self.steps = (broken, mended)
        self.kept = folder.with_name("kept")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        broken, mended = self.steps
        if trainer.global_step == broken:
            self.folder.rename(self.kept)
            self.folder.write_text("in the way")
        if trainer.global_step == mended:
            self.folder.unlink()
            shutil.move(self.kept, self.folder)


def test_training_continues_when_a_save_fails(
    tiny: Tiny, train: Train, whole: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saving is retried one step later, and two steps after that, when it succeeds."""
    config = tiny({"runtime.checkpoint_every": 4, "runtime.keep_checkpoints": 3})
    trained = train(config, callbacks=[ReplaceFolder(tmp_path / "run" / "checkpoints", 5, 11)])
    messages = failures(caplog)
    assert [message.partition("retries at step ")[2].partition(":")[0] for message in messages] == ["9", "11"]
    assert steps_of(trained.run.folder) == [4, 11, 12]
    assert all(torch.equal(value, trained.weights[name]) for name, value in whole(tiny()).weights.items())


def test_a_run_ends_even_if_its_last_step_cannot_be_saved(
    tiny: Tiny, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny({"runtime.checkpoint_every": 2, "runtime.keep_checkpoints": 2, "optim.epochs": 1})
    trained = train(config, callbacks=[ReplaceFolder(tmp_path / "run" / "checkpoints", 3, 5)])
    (message,) = failures(caplog)
    assert "step=00000004.ckpt: File exists" in message
    assert steps_of(tmp_path / "run", "kept") == [2]
    assert trained.run.summary["steps"] == 4


# ------------------------------------------------------------------ damaged checkpoints


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, whole: Train) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run stopped after step 7, with checkpoints of steps 2, 4 and 6, and the weights of the whole run."""
    folder = tmp_path_factory.mktemp("stopped")
    config = tiny({"runtime.checkpoint_every": 2, "runtime.keep_checkpoints": 3})

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == 7:
                raise RuntimeError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])
        with pytest.raises(RuntimeError, match="stopped"):
            pretrain(config, out=folder, name="run", callbacks=[Stop()])
    return folder / "run", whole(tiny()).weights


@pytest.fixture
def run(tmp_path: Path, stopped: tuple[Path, dict[str, torch.Tensor]]) -> Path:
    """A copy of the run stopped after step 7."""
    return shutil.copytree(stopped[0], tmp_path / "run")


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step={step:08d}.ckpt"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 16
    path.write_bytes(content)


def flip_in_a_tensor(path: Path) -> None:
    """Flip a bit of the largest tensor; elsewhere it may be one of the unused bytes that align tensors."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    flip(path, largest.header_offset + largest.file_size // 2)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "flipped in the middle": (flip_in_a_tensor, "checksum"),
    "flipped at the end": (lambda path: flip(path, path.stat().st_size - 20), "damaged"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "damaged"),
    "another format": (
        lambda path: torch.save(torch.load(path, weights_only=True) | {"cribo_format": CHECKPOINT_FORMAT + 1}, path),
        f"format {CHECKPOINT_FORMAT + 1}",
    ),
    "another content": (lambda path: torch.save({"state_dict": {}}, path), "optimizer_states"),
    "a list": (lambda path: torch.save([1], path), "a list"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(
    run: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    change, reason = DAMAGE[damage]
    change(path_of(run, 6))
    damaged = path_of(run, 6).read_bytes()
    with pytest.raises(UnusableCheckpoint):
        AtomicCheckpointIO().load_checkpoint(path_of(run, 6))
    assert resume_point(run) == path_of(run, 4)
    (message,) = caplog.messages
    assert all(part in message for part in (f"{path_of(run, 6)}", reason, f"{path_of(run, 4)}"))
    assert path_of(run, 6).with_name("step=00000006.ckpt.refused").read_bytes() == damaged
    assert resume_point(run) == path_of(run, 4)
    assert len(caplog.messages) == 1  # logged once


def test_a_run_resumed_past_two_damaged_checkpoints_ends_the_same(
    run: Path, resumed: Train, stopped: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    flip_in_a_tensor(path_of(run, 6))
    path_of(run, 4).write_bytes(b"")
    for name in (f".step=00000008.ckpt.{'0123' * 8}.part", ".mine.part"):
        (run / "checkpoints" / name).write_text("half")
    (run / f".config.yaml.{'89ef' * 8}.part").write_text("half")
    (run / "report").mkdir()
    (run / "report" / f".losses.png.{'4567' * 8}.part").write_text("half")
    trained = resumed(**{"runtime.checkpoint_every": 5, "runtime.keep_checkpoints": 2})
    assert all(torch.equal(value, trained.weights[name]) for name, value in stopped[1].items())
    left = {path.name for path in (run / "checkpoints").iterdir()}
    # Only cribo's own partial files are removed, and the damaged checkpoints are not counted.
    refused = {"step=00000004.ckpt.refused", "step=00000006.ckpt.refused"}
    assert left == {"step=00000010.ckpt", "step=00000012.ckpt", *refused, ".mine.part"}
    assert not list(run.glob(".config*"))
    assert not list((run / "report").iterdir())


def test_if_no_checkpoint_is_valid_all_are_named(run: Path, resumed: Train) -> None:
    path_of(run, 2).write_bytes(b"")
    os.truncate(path_of(run, 4), 1000)
    flip(path_of(run, 6), 1000)
    with pytest.raises(FolderError) as caught:
        resume_point(run)
    for part in (
        str(run / "checkpoints"),
        "00002.ckpt: the file is empty",
        "00004.ckpt: trunc",
        "00006.ckpt: the chec",
    ):
        assert part in str(caught.value)
    with pytest.raises(FolderError):
        resumed()
    assert steps_of(run) == [2, 4, 6]


# ------------------------------------------------------------------ untrusted checkpoints


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_payload_is_refused_and_not_executed(run: Path, resumed: Train, tmp_path: Path) -> None:
    content = torch.load(path_of(run, 6), weights_only=True)
    content["callbacks"]["mine"] = Payload(tmp_path / "executed")
    for step in (2, 4, 6):
        torch.save(content, path_of(run, step))
    reason = "contains .*mkdir"
    with pytest.raises(FolderError, match=reason):
        resumed()
    with pytest.raises(UnusableCheckpoint, match=reason):
        AtomicCheckpointIO().load_checkpoint(path_of(run, 6), weights_only=False)
    assert not (tmp_path / "executed").exists()
    torch.load(path_of(run, 6), weights_only=False)  # the payload works
    assert (tmp_path / "executed").exists()


# ------------------------------------------------------------------ random bytes


def assert_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for use in (check_checkpoint, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(UnusableCheckpoint):
            use(path)


LIMITED = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_refused_or_the_same(path: Path, content: bytes, whole: dict[str, Any]) -> None:
    """Changed bytes between the entries of the archive have no effect."""
    path.write_bytes(content)
    try:
        found = AtomicCheckpointIO().load_checkpoint(path)
    except UnusableCheckpoint as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        del found["state_dict"]["_extra_state"]
        for name, value in whole.items():
            assert torch.equal(found["state_dict"][name], value)


@given(st.data())
@LIMITED
def test_no_truncated_or_changed_checkpoint_is_loaded(
    tmp_path: Path, stopped: tuple[Path, dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    path = path_of(stopped[0], 6)
    whole, state = path.read_bytes(), torch.load(path, weights_only=True)["state_dict"]
    del state["_extra_state"]
    assert_refused(tmp_path / "file", whole[: data.draw(st.integers(0, len(whole) - 1))])
    flipped = bytearray(whole)
    for bit in data.draw(st.sets(st.integers(0, 8 * len(whole) - 1), min_size=1, max_size=4)):
        flipped[bit // 8] ^= 1 << bit % 8
    assert_refused_or_the_same(tmp_path / "file", bytes(flipped), state)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    if start != end:
        assert_refused_or_the_same(tmp_path / "file", whole[:start] + whole[end:], state)


@given(st.binary(max_size=500))
@LIMITED
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    assert_refused(tmp_path / "file", content)
    assert_refused(tmp_path / "file", content + b"PK\5\6" + bytes(18))


# ------------------------------------------------------------------ several processes


FILL = """
import os
import resource
import sys
from pathlib import Path
import lightning as L
import cribo.pretraining.run
from cribo.pretraining import pretrain, resume
cribo.pretraining.run.write_report = lambda *a, **k: []
os.chdir(sys.argv[1])
run = Path("run")

class Fill(L.Callback):
    '''A limit on the size of files fails in the middle of a write, as a full disk does.'''
    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero and trainer.global_step == 5:
            size = min(path.stat().st_size for path in run.glob("checkpoints/*"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
        if trainer.is_global_zero and trainer.global_step == 7:
            print("at 7:", sorted(path.name for path in run.glob("checkpoints/*")), flush=True)
        if trainer.is_global_zero and trainer.global_step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

class Tell(L.Callback):
    def on_train_end(self, trainer, *_):
        (saves,) = [callback for callback in trainer.callbacks if hasattr(callback, "saved_step")]
        # One writing: two processes share the stream, and pieces of their lines would mix.
        output = f"process {trainer.global_rank} from {saves.resume_from} saved {saves.saved_step}"
        os.write(1, output.encode() + bytes([10]))
"""


def run_program(commands: Commands, folder: Path, program: str, *, processes: int) -> str:
    """Run a program in processes of one run, and return their output."""
    started = commands.fork_program_all(processes, program, folder)
    codes = [each.wait(900) for each in started]
    output = "".join(each.output for each in started)
    assert codes == [0] * processes, output
    return output


@pytest.mark.slow
def test_two_processes_continue_when_the_disk_of_rank_0_is_full(tmp_path: Path, tiny: Tiny, commands: Commands) -> None:
    changes = {"runtime.devices": 2, "runtime.checkpoint_every": 2, "runtime.keep_checkpoints": 2}
    (tmp_path / "config.yaml").write_text(dump_config(tiny(changes)))
    program = f"{FILL}\npretrain('config.yaml', out='.', name='run', callbacks=[Fill(), Tell()])"
    output = run_program(commands, tmp_path, program, processes=2)
    # While saving fails, both previous files exist, and no partial one.
    assert "at 7: ['step=00000002.ckpt', 'step=00000004.ckpt']" in output
    assert "step=00000006.ckpt: File too large" in output
    assert output.count("could not save") == 1  # at step 6, by rank 0 only
    assert {f"process {rank} from None saved 12" for rank in (0, 1)} <= set(output.splitlines())
    run = tmp_path / "run"
    assert steps_of(run) == [10, 12]

    flip(path_of(run, 12), 300_000)
    (run / "summary.json").unlink()
    output = run_program(commands, tmp_path, f"{FILL}\nresume('run', callbacks=[Tell()])", processes=2)
    assert output.count("step=00000012.ckpt cannot be used") == 1
    assert {line.partition(" saved ")[2] for line in output.splitlines() if line.startswith("process")} == {"12"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        *("step=00000010.ckpt", "step=00000012.ckpt", "step=00000012.ckpt.refused")
    }


AGREE = """
import sys
from pathlib import Path
import lightning as L
import torch
from cribo.training.checkpoints import Checkpoints, AtomicCheckpointIO, checkpoint_files
torch.distributed.init_process_group("gloo")
rank, folders = torch.distributed.get_rank(), [Path(name) for name in sys.argv[1:]]
reader = AtomicCheckpointIO()
trainer = L.Trainer(accelerator="cpu", devices=1, plugins=[reader], logger=False, enable_checkpointing=False)
for folder in folders:
    folder = folder / str(rank)
    own = next(iter(checkpoint_files(folder)), None)
    try:
        Checkpoints(folder, every_steps=1, keep=1, resume_from=own).setup(trainer, None, "fit")
        found = reader.load_checkpoint(own)["global_step"] if own is not None else "the beginning"
    except ValueError as error:
        found = f"{type(error).__name__} {error}"
    print("found", found, flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_resume_from_a_common_checkpoint_or_fail(run: Path, tmp_path: Path, commands: Commands) -> None:
    """Each process has its own folder, as on hosts without a shared file system."""

    def hosts(name: str) -> Path:
        for rank in ("0", "1"):
            shutil.copytree(run, tmp_path / name / rank)
        return tmp_path / name

    same, behind, none, first_none, begin, damaged = map(
        hosts, ("same", "behind", "none", "first-none", "begin", "damaged")
    )
    path_of(same / "0", 6).unlink()  # rank 0 chooses
    path_of(behind / "1", 6).unlink()
    shutil.rmtree(none / "1" / "checkpoints")
    shutil.rmtree(first_none / "0" / "checkpoints")
    for rank in ("0", "1"):
        shutil.rmtree(begin / rank / "checkpoints")
    flip_in_a_tensor(path_of(damaged / "1", 6))  # the second host's file differs from the first's
    folders = (same, behind, none, first_none, begin, damaged)
    output = []
    for process in commands.fork_program_all(2, AGREE, *folders):
        assert process.wait(900) == 0, process.output
        output.append(
            [line.removeprefix("found ") for line in process.output.splitlines() if line.startswith("found ")]
        )
    host = socket.gethostname()
    for rank, lines in enumerate(output):
        assert lines[0] == "4"
        assert lines[1].startswith(f"UnusableCheckpoint {path_of(behind / '1', 6)} on {host} cannot be used")
        for line, folder, what in zip(
            lines[2:4], (none, first_none), ("the checkpoint step=00000006.ckpt", "no checkpoint"), strict=True
        ):
            assert line.startswith(f"FolderError rank 0 sees {what} in {folder / str(rank)}")
            assert f"ranks on {host} do not: use a run folder on a shared file system" in line
        assert lines[4] == "the beginning"
        assert lines[5].startswith(f"UnusableCheckpoint {path_of(damaged / '1', 6)} on {host} cannot be used")
