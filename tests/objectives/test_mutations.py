"""The mutations of mutations.yaml apply to the code as it is; `python -m tests.objectives.mutations` runs them."""

import pytest
from tests.objectives.mutations import REPOSITORY, read_mutations

from cribo.objectives.base import BUILT_IN

MUTATIONS = read_mutations()


def test_every_objective_has_six() -> None:
    assert {name: min(6, len(mutations)) for name, (mutations, _) in MUTATIONS.items()} == dict.fromkeys(BUILT_IN, 6)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_pieces_that_they_replace_exist(name: str) -> None:
    for mutation in MUTATIONS[name][0]:
        source = (REPOSITORY / "src/cribo/objectives" / mutation.file).read_text(encoding="utf-8")
        assert mutation.before in source, mutation.name
        assert mutation.after != mutation.before
