"""The house: which file may import which."""

import ast

from runs import ROOT

SCRIPTS = ("ppo_ddp", "ppg_ddp", "dqn_ddp", "sac_ddp")


def imports(name: str) -> set[str]:
    """What of ours a module imports, anywhere in its file."""
    tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {x for x in names if x.split(".")[0] in ("common", "benchmark", "tests", *SCRIPTS)}


def modules(folder: str) -> list[str]:
    return [f"{folder.replace('/', '.')}.{path.stem}" for path in sorted((ROOT / folder).glob("*.py"))]


def test_imports_go_down_only():
    """Scripts may use both floors, common/run/ may use common/, and common/ only itself."""
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
