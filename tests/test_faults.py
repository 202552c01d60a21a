"""faults.py: some of its cases, of each kind; and all of its edits still find what they replace."""

import pytest

from runs import ROOT, edited
from tests import faults

CASES = {f"{case.script}: {case.what}": case for case in faults.all_cases()}
SOME = (
    "ppo: --num-steps 10",  # refused flags
    "ppo: two ranks: a reward is nan",  # faulty environments, in a message and in the user's own traceback
    "ppo: --env-id :Raises-v0",
    "ppo: edit: a loss that is nan",
    "dqn: two ranks: torchrun killed",
    "ppo: an environment's process killed",
)


@pytest.mark.parametrize("name", SOME)
def test_a_case_is_as_it_must_be(name):
    """A run in a process of its own: what it says, its exit code, and what it leaves."""
    result = faults.tried(CASES[name])
    assert not result.wrong, result.line


def test_every_edit_of_every_case_finds_its_place():
    """And what comes of it is Python. The cases are not run."""
    for case in faults.all_cases():
        script = ROOT / f"{case.script}_ddp.py"
        compile(edited(script.name, script.read_text(), *(case.edits or [])), f"{script.name}, {case.what}", "exec")
