from benchmarks.backbones import BEGIN, END, GATED, PAGE, row, table

from cribo.cli import main
from cribo.cli.running import SUGGESTED
from cribo.models.licences import Licence, licences_of, with_teacher


def test_the_table_of_public_backbones_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert written.strip() == table()


def test_the_suggested_backbone_is_public_and_for_commercial_use(capsys) -> None:
    about = row(SUGGESTED, SUGGESTED, gated=SUGGESTED in GATED)
    assert (about.parameters, about.licence, about.commercial, about.gated) == ("22 M", "apache-2.0", "yes", "no")
    assert main(["adapt", "images"]) == 2
    assert f"; --backbone: for a start, {SUGGESTED} (22 M parameters, licence apache-2.0" in capsys.readouterr().err


def test_the_licence_of_a_teacher_is_kept_apart() -> None:
    own, teacher = Licence("a", "mit"), Licence("b", "cc-by-nc-4.0")
    assert [each.role for each in with_teacher([own], [teacher, teacher])] == ["weights", "teacher"]
    assert licences_of({"licences": []}, "run") == ()
