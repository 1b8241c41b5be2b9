"""Files from strangers, each with a canary: nothing in them runs, and nothing outside them is read, opened or written.

`CASES` is the list of places that read such files. A case is a function that writes a file and opens it as a user
would, without --trust. To add a place, write one with `@case("name")`; `Stranger` gives it folders and canaries.
"""

import dataclasses
import io
import json
import os
import shlex
import sys
import tarfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from PIL import Image
from torch import nn

from cribo.base.errors import InputError, Untrusted
from cribo.base.job import RECORD
from cribo.cli import main
from cribo.models import build_backbone, load_backbone, save_backbone

if TYPE_CHECKING:
    from cribo.pretraining import PretrainConfig

CODE = "code_of_a_stranger"
"""A module that has been imported, which must not matter."""

ADDRESS = "http://127.0.0.1:9/images"
PROGRAMS = {"os.system": {"command": "touch MARK"}, "subprocess.run": {"args": ["touch", "MARK"]}}

_watched: "list[Stranger]" = []


def _watch(event: str, values: tuple[Any, ...]) -> None:
    """Record code that runs, connections, and files outside that are opened."""
    for stranger in _watched or ():  # None while Python ends
        text = str(values)
        if event in ("os.system", "subprocess.Popen") and str(stranger.mark) in text:
            stranger.events.append(f"{event} {text}")
        if event in ("socket.connect", "socket.getaddrinfo") and isinstance(values[-1], tuple | str | int):
            stranger.events.append(f"{event} {text}")
        is_file = event in ("open", "os.listdir", "os.scandir") and isinstance(values[0], str | os.PathLike)
        if is_file and os.path.realpath(values[0]).startswith(str(stranger.outside)):
            stranger.events.append(f"{event} {text}")


sys.addaudithook(_watch)  # hooks cannot be removed; this one does nothing outside `Stranger.watching`


class Stranger:
    """Folders of a case: `files` from a stranger, `own` files of the user, and `outside`, which must not be read."""

    def __init__(self, folder: Path, config: "PretrainConfig") -> None:
        self.files, self.own, self.outside = (folder / name for name in ("files", "own", "outside"))
        self.mark = folder / "mark"
        self.config = config
        self.events: list[str] = []
        for place in (self.files, self.own / "images", self.outside):
            place.mkdir(parents=True)
        for number in range(12):
            picture(number).save(self.own / "images" / f"{number}.png")
        picture(12).save(self.outside / "secret.png")
        (self.outside / "section.yaml").write_text("root: scenes\n")
        before = safetensors.torch.save({"body.weight": torch.zeros(1)})
        (self.outside / "weights.safetensors").write_bytes(before)

    def command(self, *words: object) -> int:
        """Run a command; its exit status is 0, or 2 for refused input, never a crash."""
        status = main([str(word) for word in words])
        assert status in (0, 2)
        return status

    def saved(self, name: str, args: Mapping[str, Any], folder: str = "weights") -> Path:
        """Write weights as of cribo whose description names a network."""
        place = self.files / folder
        save_backbone(build_backbone(self.config.backbone.name, args=self.config.backbone.args, image_size=32), place)
        description = place / "backbone.json"
        text = json.dumps({**json.loads(description.read_text()), "name": name, "args": dict(args)})
        description.write_text(text.replace("MARK", str(self.mark)))
        return place

    def run(self, changes: Mapping[str, Any] | None = None, name: str = "run") -> Path:
        """Write the folder of a run with changed options."""
        from cribo.pretraining.loading import dump_config

        place = self.files / name
        network = {"args": self.config.backbone.args, "image_size": self.config.views.size}
        save_backbone(build_backbone(self.config.backbone.name, **network), place)
        values = yaml.safe_load(dump_config(self.config))
        for option, value in (changes or {}).items():
            group, _, key = option.rpartition(".")
            target = values
            for part in filter(None, group.split(".")):
                target = target[part]
            target[key] = value
        (place / "config.yaml").write_text(yaml.safe_dump(values))
        return place

    def database(self, changes: Mapping[str, Any]) -> Path:
        """Write a database of the user's images with a changed description."""
        pytest.importorskip("lance")
        from cribo.apps.search.database import ObjectDatabase

        place = self.files / "stranger.db"
        assert self.command("index", "--backbone", "mean-colour", "--images", self.own / "images", "--db", place) == 0
        ObjectDatabase.open(place).describe(**changes)
        return place

    def search(self, database: Path) -> tuple[int, int]:
        """Search a database and add to it; return both exit statuses."""
        query = ("--image", self.own / "images" / "1.png", "--box", "0,0,20,20")
        added = self.command("index", "--db", database, "--images", self.own / "images")
        return self.command("search", "--db", database, *query), added

    def shares(self, form: str) -> list[Path]:
        """Write features of the user's images as two shares, each of more than one part."""
        shares = [self.files / name for name in ("one", "two")]
        for number in range(12, 20):
            picture(number).save(self.own / "images" / f"{number}.png")
        embed = ("embed", self.own / "images", "--backbone", "mean-colour", "--format", form, "--device", "cpu")
        for number, share in enumerate(shares, start=1):
            assert self.command(*embed, "--part", f"{number}/2", "--out", share) == 0
        return shares


def picture(seed: int) -> Image.Image:
    """Return an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (48, 48, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


Case = Callable[[Stranger], Any]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Add a case to the list."""

    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


@pytest.fixture
def stranger(
    tmp_path: Path, tiny: "Callable[..., PretrainConfig]", monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stranger]:
    made = Stranger(tmp_path, tiny())
    module: Any = types.ModuleType(CODE)

    def strike(*args: Any, **options: Any) -> Any:
        made.mark.touch()
        return nn.Identity()

    class Network(nn.Module):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__()
            made.mark.touch()

    module.strike, module.Network = strike, Network
    monkeypatch.setitem(sys.modules, CODE, module)
    monkeypatch.chdir(made.own)
    made.own.joinpath("code_in_the_folder.py").write_text(f"open({str(made.mark)!r}, 'w').close()\n")
    _watched.append(made)
    try:
        yield made
    finally:
        _watched.remove(made)


# ---------------------------------------------------------------------------------------------------------- weights


@case("weights: backbone.json names a program")
def _(stranger: Stranger) -> None:
    for number, (name, args) in enumerate(PROGRAMS.items()):
        with pytest.raises(Untrusted, match="--trust"):
            load_backbone(stranger.saved(name, args, f"weights{number}"))
    saved = stranger.files / "weights0"
    assert stranger.command("embed", stranger.own / "images", "--backbone", saved, "--out", "out") == 2


@case("weights: backbone.json names a module that has been imported")
def _(stranger: Stranger) -> None:
    for number, name in enumerate((f"{CODE}.strike", f"{CODE}.Network", "code_in_the_folder.Network")):
        with pytest.raises(Untrusted, match="--trust"):
            load_backbone(stranger.saved(name, {}, f"weights{number}"))


@case("weights: a program that the user trusts must be a network")
def _(stranger: Stranger) -> None:
    with pytest.raises(InputError, match=r"subclass of torch\.nn\.Module"):
        load_backbone(stranger.saved("subprocess.Popen", {"args": ["touch", "MARK"]}), trust=True)


@case("weights: other places of cribo are as foreign as the rest")
def _(stranger: Stranger) -> None:
    for number, name in enumerate(("cribo.cli.main", "cribo.models.networks.timm", "cribo.base.files.write_text")):
        with pytest.raises(Untrusted, match="--trust"):
            load_backbone(stranger.saved(name, {}, f"weights{number}"))


@case("weights: networks of cribo read no other files")
def _(stranger: Stranger) -> None:
    for number, name in enumerate((f"local-dir:{stranger.outside}", "hf-hub:owner/name")):
        args = {"name": name, "stem_channels": 8}
        with pytest.raises(InputError, match="not a network of timm"):
            load_backbone(stranger.saved("cribo.models.networks.resnet_with_stem", args, f"weights{number}"))


@case("weights: arguments of timm name no other files")
def _(stranger: Stranger) -> None:
    network = stranger.config.backbone
    checkpoint = str(stranger.outside / "weights.safetensors")
    load_backbone(stranger.saved(network.name, {**network.args, "checkpoint_path": checkpoint, "pretrained": True}))
    other = {**network.args, "pretrained_cfg": {"file": checkpoint}, "pretrained_cfg_overlay": {"url": ADDRESS}}
    load_backbone(stranger.saved(network.name, other, "other"))


@case("weights: a checkpoint of a run names its network")
def _(stranger: Stranger) -> None:
    state = build_backbone(stranger.config.backbone.name, args=stranger.config.backbone.args).model.state_dict()
    for name, args in PROGRAMS.items():
        named = {"name": name, "args": json.loads(json.dumps(args).replace("MARK", str(stranger.mark)))}
        content = {"cribo": {"config": {"backbone": named, "views": {"size": 32}}}, "state_dict": state}
        for place in (stranger.files / "run" / "checkpoints" / "step=1.ckpt", stranger.files / "other.pth"):
            place.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, place)
        for source in (stranger.files / "run", stranger.files / "other.pth"):
            with pytest.raises(Untrusted, match="--trust"):
                load_backbone(source)


@case("weights: a pickle")
def _(stranger: Stranger) -> None:
    class Strike:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {stranger.mark}",)

    torch.save({"model": {"norm.weight": torch.zeros(4)}, "strike": Strike()}, stranger.files / "weights.pth")
    with pytest.raises(InputError, match="--trust"):
        load_backbone(stranger.files / "weights.pth")


@case("weights: a program behind a second list of files")
def _(stranger: Stranger) -> None:
    from tests.models.formats.test_reading import Canary, with_another_directory

    program = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(Canary(str(stranger.mark))), program)
    path = stranger.files / "weights.pth"
    for content in (program.getvalue(), with_another_directory(program.getvalue(), b"archive/data.pkl")):
        path.write_bytes(content)
        with pytest.raises(InputError, match="TorchScript"):
            load_backbone(path)


@case("weights: a few bytes that take hours or all memory")
def _(stranger: Stranger) -> None:
    network = stranger.config.backbone
    lists: Any = [torch.zeros(1)]
    names: Any = {"a": torch.zeros(1)}
    nothing: Any = [0]
    for _ in range(40):  # a file of 2^40 tensors
        lists, names, nothing = [lists, lists], {"a": names, "b": names}, [nothing, nothing]
    for number, content in enumerate((lists, names)):
        torch.save({"model": content}, stranger.files / f"{number}.pth")
        with pytest.raises(InputError, match="tensors"):
            load_backbone(stranger.files / f"{number}.pth")
    torch.save({"model": {"a": torch.zeros(1)}, "options": nothing}, stranger.files / "nothing.pth")
    with pytest.raises(InputError, match="no network in a known format"):
        load_backbone(stranger.files / "nothing.pth")
    for number, change in enumerate(({"depth": 10**6}, {"embed_dim": 3 * 10**6}, {"reg_tokens": 10**10})):
        with pytest.raises(InputError, match="limit"):
            load_backbone(stranger.saved(network.name, {**network.args, **change}, f"weights{number}"))


@case("weights and records: compressed files of gigabytes")
def _(stranger: Stranger) -> None:
    from cribo.evaluation.intervals import COUNTS, read_counts
    from cribo.objectives.cluster_record import CLUSTERS, read_clusters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cribo.base.files.ARCHIVE_BYTES", 2**16)
        readers: tuple[tuple[str, Callable[[Path], object]], ...] = (
            ("weights.npz", load_backbone),
            (COUNTS, lambda path: read_counts(path.parent, 1)),
            (CLUSTERS, lambda path: read_clusters(path.parent)),
        )
        for name, read in readers:
            np.savez_compressed(stranger.files / name, **{"1": np.zeros(2**20), "views": np.zeros(2**20)})  # pyright: ignore[reportArgumentType]
            with pytest.raises(InputError, match="unpacked"):
                read(stranger.files / name)


@case("a segmenter names its network")
def _(stranger: Stranger) -> None:
    from cribo.evaluation.segmentation.trained import load_segmenter

    about = {"format": 2, "backbone": {"name": f"{CODE}.strike", "args": {}}, "decoder": {}}
    path = stranger.files / "segmenter.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, path, {"cribo_segmenter": json.dumps(about)})
    with pytest.raises(Untrusted, match="--trust"):
        load_segmenter(path)


@case("a segmenter that would take hours to build")
def _(stranger: Stranger) -> None:
    from cribo.evaluation.segmentation.trained import load_segmenter
    from cribo.models import describe

    network = build_backbone(stranger.config.backbone.name, args=stranger.config.backbone.args, image_size=32)
    about = {"format": 2, "backbone": describe(network), "decoder": {"classes": 2, "layers": 10**6}}
    path = stranger.files / "segmenter.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, path, {"cribo_segmenter": json.dumps(about)})
    with pytest.raises(InputError, match="limit"):
        load_segmenter(path)


# ------------------------------------------------------------------------------------------------------------- runs

_CODE_OF_RUN = (
    {"objective.name": f"{CODE}.strike"},
    {"objective.name": "cribo.cli.main"},
    {"objects.clustering": f"{CODE}.strike"},
    {"objects.criterion": "code_in_the_folder.strike"},
    {"backbone.name": f"{CODE}.Network"},
    {"data.root": ADDRESS},
    {"backbone.pretrained": "hf://owner/name"},
)


@case("a run: code and addresses in its configuration, resumed")
def _(stranger: Stranger) -> None:
    from cribo.pretraining.run import resume

    for number, changes in enumerate(_CODE_OF_RUN):
        with pytest.raises(Untrusted, match="--trust"):
            resume(stranger.run(changes, f"run{number}"))
    assert stranger.command("pretrain", "--resume", stranger.files / "run0") == 2


@case("a run: addresses in the list or table of images that it names, resumed")
def _(stranger: Stranger) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from cribo.base.errors import UnreadableImage
    from cribo.data import open_collection
    from cribo.pretraining.run import resume

    listed, table, rows = (stranger.files / name for name in ("list.txt", "table.parquet", "rows.parquet"))
    listed.write_text(f"{ADDRESS}/1.png\n")
    pq.write_table(pa.table({"path": [f"{ADDRESS}/1.png"]}), table)
    for number, place in enumerate((listed, table)):
        with pytest.raises(Untrusted, match=r"--data\.root"):
            resume(stranger.run({"data.root": str(place)}, f"run{number}"))
    # Rows without bytes, whose paths are not listed.
    places = [{"bytes": None, "path": path} for path in (f"{ADDRESS}/1.png", "../outside/secret.png")]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(pa.table({"image": pa.array(places, kind)}), rows)
    images = open_collection(rows, inside=True)
    for index in range(2):
        with pytest.raises(UnreadableImage):
            images.read(index)


@case("a run: classes and files in place of values")
def _(stranger: Stranger) -> None:
    from cribo.pretraining.recorded import read_run_config

    strike = {"class_path": f"{CODE}.strike", "init_args": {}}
    section = str(stranger.outside / "section.yaml")
    changes = (
        {"backbone.args": {"a": strike}},
        {"objective.args": {"a": {"b": strike}}},
        {"data": strike},
        {"data": section},
        {"data.scenes": section},
        {"config": section},
    )
    for number, change in enumerate(changes):
        with pytest.raises(InputError, match=r"config\.yaml"):
            read_run_config(stranger.run(change, f"run{number}"))


@case("a run: its pictures, without the code of its objective")
def _(stranger: Stranger) -> None:
    from cribo.explorer.view_pairs import PairSample

    for number, change in enumerate(({"objective.name": f"{CODE}.strike"}, {"objective.name": "cribo.cli.main"})):
        run = stranger.run(change, f"run{number}")
        _, drawn = PairSample(run, str(run), stranger.own / "images", "cpu").picture(0)
        assert drawn.views[0].shape
    run = stranger.run({"objects.clustering": f"{CODE}.strike", "objective.name": f"{CODE}.strike"}, "clustered")
    with pytest.raises(InputError, match="--trust"):
        PairSample(run, str(run), stranger.own / "images", "cpu").picture(0)


@case("a run: the images that it names, behind links too")
def _(stranger: Stranger) -> None:
    from cribo.explorer.config import ExploreConfig
    from cribo.explorer.contents import open_contents
    from cribo.pretraining.figures import write_figures
    from cribo.pretraining.figures.config import FigureConfig

    (stranger.files / "linked").mkdir()
    (stranger.files / "linked" / "it's").symlink_to(stranger.outside)
    for number, root in enumerate((stranger.outside, stranger.files / "linked" / "it's", ADDRESS)):
        run = stranger.run({"data.root": str(root), "objective.name": f"{CODE}.strike"}, f"run{number}")
        with pytest.raises(Untrusted) as refused:
            open_contents(ExploreConfig(run=run, device="cpu"), stranger.own, lambda what, done, total: None)
        given = shlex.split(str(refused.value))
        assert given[given.index("--images") + 1] == str(root)
        with pytest.raises(Untrusted, match=r"cribo figures --run .* --images"):
            write_figures({"run": run}, stranger.own / "figures", FigureConfig())


@case("a run: figures without its code")
def _(stranger: Stranger) -> None:
    from cribo.pretraining.figures import write_figures
    from cribo.pretraining.figures.config import FigureConfig

    run = stranger.run({"data.root": str(stranger.outside), "objective.name": f"{CODE}.strike"})
    small = FigureConfig(only=("features",), pictures=2, format=("png",), images=str(stranger.own / "images"))
    write_figures({"run": run}, stranger.own / "figures", small)
    run = stranger.run({"objects.clustering": f"{CODE}.strike"}, "clustered")
    with pytest.raises(InputError, match="--trust"):
        write_figures({"run": run}, stranger.own / "other", dataclasses.replace(small, only=("matches",)))


# -------------------------------------------------------------------------------------- databases, memories, results


@case("a database: its backbone names a program")
def _(stranger: Stranger) -> None:
    place = stranger.database({"config": {"source": str(stranger.saved("os.system", PROGRAMS["os.system"]))}})
    assert stranger.search(place) == (2, 2)


@case("a database: its backbone is at an address, or custom")
def _(stranger: Stranger) -> None:
    for config in ({"source": "hf://owner/name"}, {"source": "a.pth", "architecture": f"{CODE}.strike"}):
        assert stranger.search(stranger.database({"config": config})) == (2, 2)


@case("a database: its images are at an address")
def _(stranger: Stranger) -> None:
    place = stranger.database({"images": ADDRESS, "root": ADDRESS, "files": False})
    assert stranger.command("search", "--db", place, "--duplicates") == 2
    assert stranger.command("search", "--db", place, "--image", "1.png") == 2
    assert stranger.command("index", "--db", place) == 2


@case("a memory: its backbone is only a name")
def _(stranger: Stranger) -> None:
    from cribo.features.memory.storage import read_memory, write_memory

    labels = Image.new("L", (48, 48))
    labels.paste(1, (0, 0, 24, 48))
    (stranger.own / "examples").mkdir()
    for name in ("a", "b"):
        (picture(0)).save(stranger.own / "examples" / f"{name}.jpg")
        labels.save(stranger.own / "examples" / f"{name}.png")
    memory = stranger.files / "memory.safetensors"
    words = ("segment", "--backbone", "mean-colour", "--images", stranger.own / "images", "--pictures", 0)
    assert stranger.command(*words, "--examples", stranger.own / "examples", "--memory", memory, "--out", "out") == 0
    write_memory(memory, dataclasses.replace(read_memory(memory), source=f"{CODE}.strike"))
    assert stranger.command("segment", "--memory", memory, "--list") == 0
    stranger.command(*words, "--memory", memory, "--out", "again")
    # Shards of images with paths that lead outside.
    with tarfile.open(stranger.files / "0.tar", "w") as shard:
        for name in ("../../outside/a.png", f"{stranger.outside}/b.png"):
            content = io.BytesIO()
            picture(1).save(content, "png")
            entry = tarfile.TarInfo(name)
            entry.size = len(content.getvalue())
            content.seek(0)
            shard.addfile(entry, content)
    shards = ("segment", "--backbone", "mean-colour", "--images", stranger.files / "0.tar", "--pictures", 0)
    stranger.command(*shards, "--examples", stranger.own / "examples", "--out", "of shards")
    assert not any((stranger.outside / name).exists() for name in ("a.png", "b.png"))


@case("shares of features: files outside them")
def _(stranger: Stranger) -> None:
    pytest.importorskip("lance")
    mine = stranger.outside / "weights.safetensors"
    before = mine.stat()  # opening it would be recorded
    shares = stranger.shares("lance")
    [record] = (shares[0] / "features").glob("part-*.json")
    content = record.read_text()
    [file] = (shares[0] / "features.lance" / "data").iterdir()
    for place in (mine, os.path.relpath(mine, file.parent)):
        record.write_text(content.replace(json.dumps(file.name), json.dumps(str(place))))
        assert record.read_text() != content
        assert stranger.command("merge", *shares, "--out", stranger.own / "merged") == 2
    record.write_text(content)
    file.unlink()
    file.symlink_to(mine)
    assert stranger.command("merge", *shares, "--out", stranger.own / "merged") == 2
    after = mine.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


@case("shares of features, of billions that are missing")
def _(stranger: Stranger) -> None:
    shares = stranger.shares("numpy")
    before = [json.loads((share / RECORD).read_text()) for share in shares]
    for of_all, division in ({"parts": 10**12}, 2), ({}, 10**12):
        for number, (share, record) in enumerate(zip(shares, before, strict=True), start=1):
            forged = {**record, "identity": record["identity"] | of_all, "share": f"{number}/{division}"}
            (share / RECORD).write_text(json.dumps(forged))
        assert stranger.command("merge", *shares, "--out", stranger.own / "merged") == 2


@case("a study: results outside it")
def _(stranger: Stranger) -> None:
    rows = {"a": {"seeds": {"0": 1.0}, "folders": {"0": str(stranger.outside)}}}
    scores = {"s": {"metric": "miou", "varied": "k", "settings": {}, "rows": rows}}
    for name in ("one", "two"):
        (stranger.files / name).mkdir()
        (stranger.files / name / "results.json").write_text(json.dumps({"kind": "study", "scores": scores}))
    assert stranger.command("study", "compare", stranger.files / "one", stranger.files / "two") == 2


@case("results name their evaluation")
def _(stranger: Stranger) -> None:
    content = {"evaluation": f"{CODE}.strike", "backbone": {"source": ADDRESS}, "rows": []}
    (stranger.files / "results.json").write_text(json.dumps(content))
    stranger.command("evaluate", "compare", stranger.files / "results.json")


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_stranger_runs(name: str, stranger: Stranger) -> None:
    CASES[name](stranger)
    assert not stranger.mark.exists()
    assert not stranger.events


def test_weights_on_the_hub_name_a_program(stranger: Stranger, hub: Any) -> None:
    hub.add_folder("owner/name", stranger.saved("os.system", PROGRAMS["os.system"]))
    with pytest.raises(Untrusted, match="--trust"):
        load_backbone("hf://owner/name")
    assert not stranger.mark.exists()


def test_the_canaries_strike_for_who_trusts_them(stranger: Stranger) -> None:
    """Otherwise the cases above would prove nothing."""
    with pytest.raises(InputError, match="must return a module"):
        load_backbone(stranger.saved("os.system", PROGRAMS["os.system"]), trust=True)
    assert stranger.mark.exists()
    assert stranger.events
    (stranger.outside / "secret.png").read_bytes()
    assert str(stranger.outside) in stranger.events[-1]
