"""The code blocks of README.md, CONTRIBUTING.md and docs/.

Every block has a language. Blocks of `python` and `bash` run, in this order page by page, in a folder with a small run,
some images and labelled examples under the names that the pages use. Two kinds of comments precede blocks:

    <!-- given: images = torch.rand(2, 3, 32, 32) -->    statements to run before a block of Python
    <!-- not run: needs COCO -->                          the block is not run; its commands are parsed all the same

`<!-- commands not run: ... -->` anywhere on a page is the second for all its commands. Square brackets in a command
that is not run enclose options that may be left out.

Options, import paths, functions and files that the text names in backticks must exist.
"""

import ast
import contextlib
import io
import pkgutil
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from cribo.base.arguments import Parser
from cribo.cli import COMMANDS, main
from cribo.cli.evaluate import EVALUATIONS
from cribo.data.scenes import Scenes

if TYPE_CHECKING:
    from cribo.pretraining import PretrainConfig

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "yaml", "json", "text", "bibtex"}
COMMENT = re.compile(r"<!-- (given|not run|commands not run): (.*?) -->", re.DOTALL)
BLOCK = re.compile(r"(?P<above>(?:^<!--(?:(?!-->).)*-->\n+)*)^```(?P<language>.*?)\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A code block of a page."""

    page: Path
    line: int
    language: str
    code: str
    given: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    whole_page = next((reason for kind, reason in COMMENT.findall(text) if kind == "commands not run"), "")
    found = []
    for block in BLOCK.finditer(text):
        comments = dict(COMMENT.findall(block["above"]))
        not_run = comments.get("not run", whole_page if block["language"] == "bash" else "")
        line = text.count("\n", 0, block.start("code")) + 1
        found.append(Block(page, line, block["language"], block["code"], comments.get("given", ""), not_run))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a block."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.not_run:
        lines = [re.sub(r"[\[\]]", "", line) for line in lines]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def cribo_words(words: list[str]) -> list[str] | None:
    """The words after `cribo`, which may follow `uv run` or a launcher; None for other commands."""
    return words[words.index("cribo") + 1 :] if "cribo" in words else None


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_has_a_language(block: Block) -> None:
    assert block.language in LANGUAGES


class Parsed(BaseException):
    """Raised instead of running a command: its arguments are valid."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Fails unless the words after `cribo` are valid arguments; runs nothing."""
    parse_args = Parser.parse_args

    def parse_only(self: Parser, *args: Any, **kwargs: Any) -> None:
        parse_args(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", parse_only)
    monkeypatch.syspath_prepend(REPOSITORY / "examples")

    def parse(arguments: list[str]) -> None:
        with pytest.raises(Parsed):
            main(arguments)

    return parse


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_commands_are_valid(block: Block, parse: Callable[[list[str]], None]) -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in commands(block):
        if (arguments := cribo_words(words)) is not None:
            parse(arguments)
        for extra in re.findall(r"cribo-ssl\[(\w+)\]", " ".join(words)):
            assert extra in extras


HELP = [["--help"], *([name, "--help"] for name in COMMANDS), *(["evaluate", name, "--help"] for name in EVALUATIONS)]


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """The help of all commands."""
    found = {}
    for words in HELP:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main(words)
        found[" ".join(words)] = shown.getvalue()
    return found


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_examples_of_help_are_valid(
    words: list[str], help_texts: dict[str, str], parse: Callable[[list[str]], None]
) -> None:
    shown = re.sub(r"\\\n +", " ", help_texts[" ".join(words)])
    examples = re.findall(r"^  cribo ([^ ].*?)(?: {2,}.*)?$", shown, re.M)
    assert examples or words == ["evaluate", "--help"]  # each evaluation has its own
    for example in examples:
        parse(shlex.split(example))


# ------------------------------------------------------------------ blocks that run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny: "Callable[..., PretrainConfig]") -> Path:
    """A folder with what the pages name: runs, images and labelled examples."""
    from cribo.pretraining import pretrain

    home = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])  # no page reads it
        network = {"patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
        run = pretrain(tiny({"optim.epochs": 2, "backbone.args": network}), out=home / "runs", name="quickstart")
    for name in ("runs/camvid", "runs/mine", "runs/a", "runs/b", "BACKBONE"):
        shutil.copytree(run.folder, home / name)
    scenes = Scenes(count=6, size=96, seed=3)
    for folder in ("path/to/images", "PHOTOGRAPHS", "FRAMES", "NORMAL", "holiday"):
        (home / folder).mkdir(parents=True)
        for index in range(3):
            Image.fromarray(scenes.load(index).permute(1, 2, 0).numpy()).save(home / folder / f"{index}.jpg")
    for folder in ("EXAMPLES", "labelled"):
        for part in ("images", "labels"):
            (home / folder / part).mkdir(parents=True)
        for index in range(3, 6):
            Image.fromarray(scenes.load(index).permute(1, 2, 0).numpy()).save(home / folder / f"images/{index}.png")
            Image.fromarray(scenes.labels(index).numpy()).save(home / folder / f"labels/{index}.png")
        (home / folder / "classes.txt").write_text("\n".join(scenes.classes))
    (home / "MASKS").mkdir()
    Image.fromarray(scenes.labels(0).numpy()).save(home / "MASKS/0.png")
    for name in ("photo.jpg", "street.jpg", "new.jpg", "PHOTOGRAPHS/street.jpg"):
        Image.open(home / "FRAMES/0.jpg").resize((400, 300)).save(home / name)
    Image.fromarray(np.repeat(np.arange(3, dtype=np.uint8), 40_000).reshape(300, 400)).save(home / "street.png")
    return home


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("cribo.evaluation.data.HELD_OUT_SCENES", (20, 10))
    for block in blocks_of(page):
        if block.not_run:
            continue
        if block.language == "bash":
            for words in commands(block):
                arguments = cribo_words(words)
                assert arguments is not None or words[:2] == ["pip", "install"], f"{block}: mark it as not run"
                assert arguments is None or main(arguments) == 0, f"{block}: {words}"
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
            names: dict[str, Any] = {}
            exec(block.given, names)
            exec(code, names)


# ------------------------------------------------------------------ pages of commands

PAGE_OF = {
    "pretrain": "pretraining.md",
    "adapt": "adapting.md",
    "distill": "distilling.md",
    "study": "studies.md",
    "profile": "speed.md",
    "evaluate": "evaluation.md",
    "benchmark": "evaluation/card.md",
    "segment": "segmentation.md",
    "embed": "embedding.md",
    "index": "object-search.md",
    "merge": "scale.md",
    "search": "object-search.md",
    "explore": "explorer.md",
    "serve": "serving.md",
    "figures": "figures.md",
    "export": "export.md",
    "shard": "sharding.md",
}
"""The page of each command, in docs/; a command without an entry has a page of its own name."""


PROTOCOL_PAGES = {"segmenter": "linear.md", "compare": "comparing.md"}
"""The page of an evaluation, in docs/evaluation/, if it has not the name of the evaluation."""


@pytest.mark.parametrize("name", EVALUATIONS)
def test_pages_of_evaluations_have_the_same_order(name: str) -> None:
    """What it measures and an example, the section Files, and then all others."""
    text = (REPOSITORY / "docs/evaluation" / PROTOCOL_PAGES.get(name, f"{name}.md")).read_text(encoding="utf-8")
    introduction, *sections = re.split(r"^## ", text, flags=re.M)
    assert f"cribo evaluate {name} " in "".join(block["code"] for block in BLOCK.finditer(introduction))
    assert sections[0].startswith("Files\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_pages_of_commands_have_the_same_order(command: str) -> None:
    """What the command does, an example, and the sections Options, Files and Problems, before all others."""
    text = (REPOSITORY / "docs" / PAGE_OF.get(command, f"{command}.md")).read_text(encoding="utf-8")
    introduction, *sections = re.split(r"^## ", text, flags=re.M)
    assert f"`cribo {command}`" in introduction
    examples = [block["code"] for block in BLOCK.finditer(introduction) if block["language"] == "bash"]
    assert any(re.search(rf"\bcribo {command}\b", example) for example in examples)
    assert [section.partition("\n")[0] for section in sections[:3]] == ["Options", "Files", "Problems"]
    assert "| what to do |" in sections[2]


# ------------------------------------------------------------------ names in the text

NAMED = re.compile(r"`([^`]+)`")
OPTION = re.compile(r"--[a-z][\w.-]*")
OTHER_NAMES = {
    *("site_url", "repo_url"),  # of MkDocs
    "row_group_size",  # of pyarrow
    *("eval_knn.py", "eval_spair.py", "eval_video_segmentation.py"),  # DINO, DIFT
    *("main.py", "datasets/coco.py", "models/backbone.py", "models/detector.py"),  # YOLOS
    *("YolosForObjectDetection.from_pretrained", "AutoImageProcessor.from_pretrained", "ViTModel"),  # transformers
    *("interpolate_pos_encoding", "forward_features", "--hypothesis-profile", "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL"),
    "labelme2voc.py",  # LabelMe
    *("--allow-unmatched-labels", "--clear-existing", "--conf-threshold", "--conv-mask-to-poly"),  # CVAT
    *("--build-arg", "--cpus", "--gpus", "--init", "--read-only", "--rm", "--shm-size", "--tmpfs", "--user"),  # Docker
    "HF_TOKEN",  # Hugging Face
    *("MLFLOW_TRACKING_URI", "WANDB_ENTITY", "WANDB_TAGS", "WANDB_RUN_GROUP"),
    *("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
    *("my_set", "loss_image", "cribo.json"),  # a placeholder, a key with the name of a loss, a file
}
"""Names in the text that the code of this project does not contain."""


class Code(NamedTuple):
    """Names in this project's code."""

    files: list[str]  # paths
    defined: set[str]  # functions, classes and fields
    modules: dict[str, str]  # of the classes of the package
    words: set[str]  # names of the package, and words of its strings other than docstrings


@pytest.fixture(scope="module")
def code() -> Code:
    found = Code([], set(), {}, set())
    for folder in ("src", "tests", "benchmarks", "docs", "examples"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            path = file.relative_to(REPOSITORY / folder).with_suffix("")
            found.files.append(f"/{folder}/{path}.py")
            content = file.read_text(encoding="utf-8")
            found.defined.update(re.findall(r"^ *(?:def|class) (\w+)", content, re.M))
            for node in ast.walk(ast.parse(content)) if folder == "src" else ():
                match node:
                    case ast.ClassDef(name=name):
                        found.modules[name] = ".".join(path.parts).removesuffix(".__init__")
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        found.defined.add(name)
                    case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                        found.words.add(name)
                    case ast.Constant(value=str(text)) if "\n\n" not in text:
                        found.words.update(re.findall(r"\w+", text))
    for file in (REPOSITORY / "src").rglob("*.yaml"):
        found.words.update(re.findall(r"\w+", file.read_text(encoding="utf-8")), [file.stem])
    found.words.update(found.defined)
    return found


@pytest.fixture(scope="module")
def options(help_texts: dict[str, str]) -> set[str]:
    """The options of all commands."""
    return {option for text in help_texts.values() for option in OPTION.findall(text)}


def unknown_names(span: str, code: Code, options: set[str]) -> set[str]:
    """The names in a piece of text between backticks that look like this project's and do not exist."""
    first, *_ = span.split() or [""]
    if first.startswith("--") or first in ("cribo", *COMMANDS, *EVALUATIONS):
        return set(OPTION.findall(span)) - options
    if re.fullmatch(r"[\w./-]+\.py", span):
        return set() if any(file.endswith(f"/{span}") for file in code.files) else {span}
    found = {name for name in re.findall(r"\bcribo(?:\.\w+)+", span) if not _exists(name)}
    if called := re.match(r"(?:\w+=)?([\w.]+)\(", span):
        found |= {called[1].rpartition(".")[2]} - code.defined
    if member := re.match(r"([A-Z][a-z]\w*)\.([a-z]\w*)", span):
        module = code.modules.get(member[1])
        found |= set() if module and _exists(f"{module}:{member[1]}", member[2]) else {member[0]}
    if re.fullmatch(r"\w+_\w+|[A-Z][a-z]+[A-Z]\w+", span):
        found |= {span} - code.words
    return found


def _exists(name: str, member: str = "") -> bool:
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return not member or hasattr(found, member) or member in getattr(found, "__dataclass_fields__", ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path, code: Code, options: set[str]) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    unknown = {name for span in NAMED.findall(text) for name in unknown_names(span, code, options)}
    assert unknown <= OTHER_NAMES


@pytest.mark.parametrize(
    "span",
    [
        *("--gone 1", "cribo segment --gone", "cribo.gone", "cribo.apps.segment.gone", "SegmentationMemory.gone"),
        *("gone()", "memory.gone(1)", "a_name_that_is_gone", "GoneConfig", "method/gone.py"),
    ],
)
def test_names_that_do_not_exist_are_found(span: str, code: Code, options: set[str]) -> None:
    assert unknown_names(span, code, options)


def test_pages_named_in_the_code_exist() -> None:
    files = [file for file in (REPOSITORY / "src").rglob("*") if file.suffix in (".py", ".json", ".yaml")]
    pages = {page for file in files for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert pages
    assert [page for page in sorted(pages) if not (REPOSITORY / page).exists()] == []
