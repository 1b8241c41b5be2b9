"""Commands in messages can be copied to a shell."""

import ast
import re
import shlex
from pathlib import Path

import cribo
from cribo.base.wording import command_line

SOURCES = sorted(Path(cribo.__file__).parent.rglob("*.py"))
# A value after one of these would be an argument of a command for the user's shell.
COMMAND = re.compile(
    r"(^|[ '(])(cribo [a-z-]+ [^:;,]*--[a-z_.]+[ =]|sbatch |(with|repeat|command) [^:;,]*--[a-z_.]+[ =])$"
)


def test_words_are_quoted_for_a_shell() -> None:
    words = ["cribo", "embed", "my photographs", "--out", Path("it's $HOME"), "--name", "a;b", "--x", "[1]"]
    assert shlex.split(command_line(*words)) == [str(word) for word in words]


def test_no_message_has_a_command_with_an_unquoted_value() -> None:
    """Printed commands are made by `command_line`, not by f-strings with values after options."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.JoinedStr):
                continue
            before = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    before += str(part.value)
                elif isinstance(part, ast.FormattedValue):
                    is_constant = isinstance(part.value, ast.Name) and part.value.id.isupper()
                    if COMMAND.search(before) and not is_constant:
                        found.append(f"{path}:{node.lineno}: {before}{{{ast.unparse(part.value)}}}")
                    before += "VALUE"
    assert not found
