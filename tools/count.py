"""How long and how dense the code is: `python tools/count.py` prints a line for each file, and for each folder.

Lines; characters of an average line that is not blank; assignments that pack several values, such as `a, b = 1, 2`,
and lines of more than 110 characters, both in percent.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def packs(node: ast.AST) -> bool:
    """Whether an assignment has several values on its right (the results of one function are one)."""
    return isinstance(node.value, ast.Tuple) and any(isinstance(target, ast.Tuple) for target in node.targets)


def counted(name: str, files: list[Path]) -> str:
    texts = [file.read_text() for file in files]
    lines = [line for text in texts for line in text.splitlines()]
    full = [line for line in lines if line.strip()]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    packed = 100 * sum(map(packs, nodes)) / max(len(nodes), 1)
    long = 100 * sum(len(line) > 110 for line in full) / max(len(full), 1)
    average = sum(map(len, full)) / max(len(full), 1)
    return f"{name:28}{len(lines):6} lines {average:6.1f} characters {packed:5.1f} % packed {long:5.1f} % long"


def main() -> None:
    scripts = sorted(ROOT.glob("*_ddp.py"))
    common = sorted(ROOT.glob("common/**/*.py"))
    for file in [*scripts, *common]:
        print(counted(str(file.relative_to(ROOT)), [file]))
    print(counted("scripts", scripts))
    print(counted(f"common/ ({len(common)} files)", common))
    print(counted("tests/", sorted(ROOT.glob("tests/*.py"))))


if __name__ == "__main__":
    main()
