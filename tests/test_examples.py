"""Every example runs as documented in its docstring."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from PIL import Image
from tests.commands import Commands

from cribo.cli import main

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
SCRIPT = """
import runpy
import cribo
import cribo.pretraining.run as run

def small(*args, overrides, **options):
    return run.pretrain(*args, overrides=overrides | {"data.scenes.count": 64, "optim.epochs": 1}, **options)

cribo.pretrain = small
del sys.argv[0]
if not sys.argv[0].endswith("own_clustering.py"):  # its functions are used in the report, too
    run.write_report = lambda *args, **kwargs: []
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# These write a run with this loss to the given folder.
TRAINING = {
    "own_clip": "next",
    "own_clustering": "cross_image",
    "own_contrast": "contrast",
    "own_mixture": "mixture",
    "own_objective": "similarity",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path, commands: Commands) -> None:
    words = [tmp_path] if example.stem in TRAINING else []
    done = commands.fork_program(SCRIPT, example, *words)
    assert done.wait(900) == 0, done.output[-3000:]
    assert done.output.strip()
    if words:
        header = next(tmp_path.glob("*/metrics.csv")).read_text().splitlines()[0]
        assert f"loss_{TRAINING[example.stem]}" in header


NAMES = [f"{number:02d}.png" for number in range(20)]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twenty images, beside a program `cribo` that prints the arguments it gets."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        Image.new("RGB", (48, 32), (12 * number, 80, 160)).save(folder / name)
    (tmp_path / "cribo").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    for name in ("cribo", "srun"):
        (tmp_path / name).chmod(0o755)
    return folder


def run_script(words: list[Any], folder: Path, **environment: str) -> None:
    """Run a shell script, and in this process the command that it starts."""
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    printed = subprocess.check_output(words, env={"PATH": path, **environment}, text=True)
    assert main(printed.splitlines()) == 0


def assert_all_embedded(results: Path) -> None:
    assert pyarrow.parquet.read_table(results / "features")["image"].to_pylist() == NAMES


def test_a_job_array_runs(tmp_path: Path, images: Path) -> None:
    script = ["bash", CLUSTER / "slurm.sbatch", images, "mean-colour", tmp_path / "out"]
    for number in ("1", "2"):
        run_script(script, tmp_path, SLURM_ARRAY_TASK_ID=number, SLURM_ARRAY_TASK_COUNT="2")
    parts, merged = tmp_path / "out" / "parts", tmp_path / "out" / "all"
    assert main(["merge", *map(str, parts.iterdir()), "--out", str(merged)]) == 0
    assert_all_embedded(merged)


@pytest.mark.usefixtures("images")
def test_an_indexed_job_on_kubernetes_runs(tmp_path: Path) -> None:
    embed, merge = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    [container] = embed["spec"]["template"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    cores = container["resources"]["limits"]["cpu"]
    assert environment == {"SHARES": str(embed["spec"]["completions"]), "OMP_NUM_THREADS": cores}
    assert merge["spec"]["suspend"]

    def run(job: dict[str, Any], **environment: str) -> None:
        """Run the command of a job, with paths in this folder."""
        [container] = job["spec"]["template"]["spec"]["containers"]
        [script] = container["args"]
        for mount in container["volumeMounts"]:
            script = script.replace(mount["mountPath"], f"{tmp_path}{mount['mountPath']}")
        script = script.replace("vit_small_patch16_224.dino", "mean-colour")  # without a download
        run_script([*container["command"], script], tmp_path, **environment)

    for index in ("0", "1"):
        run(embed, JOB_COMPLETION_INDEX=index, SHARES="2")
    run(merge)
    assert_all_embedded(tmp_path / "features" / "all")


def test_the_job_on_kubernetes_has_a_worker_for_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())["spec"]
    [group] = job["rayClusterSpec"]["workerGroupSpecs"]
    name, *words = job["entrypoint"].split()
    assert name == "cribo"
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["engine"] == "ray"
    assert config["ray"]["workers"] == group["replicas"] == group["minReplicas"]
    [container] = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
