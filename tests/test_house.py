"""The house: which file may import which, and the map of it in docs/architecture.md."""

import ast
import re

import pytest

from runs import ROOT

SCRIPTS = ("ppo_ddp", "ppg_ddp", "dqn_ddp", "sac_ddp")


def imports(name: str) -> set[str]:
    """What of ours a module imports, anywhere in its file."""
    tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {x for x in names if x.split(".")[0] in ("common", "benchmark", "tests", "tools", *SCRIPTS)}


def modules(folder: str) -> list[str]:
    return [f"{folder.replace('/', '.')}.{path.stem}" for path in sorted((ROOT / folder).glob("*.py"))]


def test_imports_go_down_only():
    """Scripts may use common/ and common/run/, common/run/ itself and common/, and common/ only itself."""
    for name in SCRIPTS:
        assert all(x.startswith("common.") for x in imports(name)), name
    for name in [*modules("common"), *modules("common/run")]:
        allowed = ("common.",) if name.startswith("common.run.") else tuple(modules("common"))
        assert all(x.startswith(allowed) and x not in SCRIPTS for x in imports(name)), name


def test_no_two_files_need_each_other():
    """Directly or through others."""
    needs = {name: imports(name) for name in [*modules("common"), *modules("common/run")]}
    done: set[str] = set()
    while ready := {name for name in needs if name not in done and needs[name] <= done}:
        done |= ready
    assert done == needs.keys(), f"a circle among {sorted(needs.keys() - done)}"


@pytest.mark.parametrize("folder", ["common", "common/run"])
def test_the_map_names_what_each_file_imports(folder):
    """docs/architecture.md: a line for each file, and after its arrow the files of ours that it imports."""
    page = (ROOT / "docs" / "architecture.md").read_text().partition(f"\n### {folder}/\n")[2].partition("\n#")[0]
    told = {}
    for entry in re.split(r"\n- `", page)[1:]:
        name, after = entry.partition("`")[0], " ".join(entry.partition("→")[2].split())
        told[name] = set() if after == "none" else set(after.split(", "))
    found = {path.stem: imports(f"{folder.replace('/', '.')}.{path.stem}") for path in (ROOT / folder).glob("*.py")}
    assert told == {name: {x.rpartition(".")[2] for x in needs} for name, needs in found.items()}


CALLS = ("DDP(", "open_run(", "run.load_or_start(", "run.backward(", "run.mean_over_ranks(", "run.means.row(")
CALLS += ("run.row_due(", "run.evaluate_and_checkpoint(", "rb.sample(", "moments.update(", "world.gather")
CALLS += (" standardized(", " explained_variance(")


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_that_need_all_processes_are_marked(script):
    """Each call of a function in which processes exchange data."""
    lines = [line for line in (ROOT / f"{script}.py").read_text().splitlines() if any(x in line for x in CALLS)]
    assert len(lines) >= 8 and all("# collective" in line for line in lines)
