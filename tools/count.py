"""How long and how dense the code is: `python tools/count.py` prints a line for each file, and for each folder.

Lines; characters of an average line that is not blank; assignments that pack several values, such as `a, b = 1, 2`,
and lines of more than 110 characters, both in percent.
"""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Count(NamedTuple):
    lines: int
    average: float
    packed: float
    long: float

    def __str__(self) -> str:
        long = f"{self.packed:5.1f} % packed {self.long:5.1f} % long"
        return f"{self.lines:6} lines {self.average:6.1f} characters {long}"


def packs(node: ast.Assign) -> bool:
    """Whether an assignment has several values on its right (the results of one function are one)."""
    return isinstance(node.value, ast.Tuple) and any(isinstance(target, ast.Tuple) for target in node.targets)


def count(files: list[Path]) -> Count:
    texts = [file.read_text() for file in files]
    lines = [line for text in texts for line in text.splitlines()]
    full = [len(line) for line in lines if line.strip()]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    packed = 100 * sum(map(packs, nodes)) / max(len(nodes), 1)
    long = 100 * sum(length > 110 for length in full) / max(len(full), 1)
    return Count(len(lines), sum(full) / max(len(full), 1), packed, long)


def main() -> None:
    scripts = sorted(ROOT.glob("*_ddp.py"))
    common = sorted(ROOT.glob("common/*.py"))
    for file in [*scripts, *common]:
        print(f"{file.relative_to(ROOT)!s:28}{count([file])}")
    print(f"{'scripts':28}{count(scripts)}")
    print(f"{f'common/ ({len(common)} files)':28}{count(common)}")
    print(f"{'tests/':28}{count(sorted(ROOT.glob('tests/*.py')))}")


if __name__ == "__main__":
    main()
