"""A script and the files of `common/` that it uses, as one file that needs no folder beside it.

    python tools/onefile.py ppo_ddp.py my_ppo.py
    python tools/onefile.py ppo_ddp.py my_ppo.py --without tracking video pool

The files come first, each under its name and after those that it needs; then the script. At the top stand the packages
that it needs, for `uv run my_ppo.py` (PEP 723). Works on your own copies too: the `common/` beside the script is taken.
`--without`: files to leave out, of those that are imported inside a function; who asks for one is told so.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import symtable
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
Import = ast.Import | ast.ImportFrom


class Source:
    """A file: `head`, the lines above its imports; `imports`, those of other packages; `code`, all below.

    `needed`: the modules of `common/` that it imports at its top. `needed_later`: inside functions, where the imports
    are cut out, or replaced by an error for those of `without`. `defined`: the names that are made at its top.
    Raises `ValueError` for code above an import, and for imports from `common/` in other forms.
    """

    def __init__(self, path: Path, without: Sequence[str]) -> None:
        self.path = path
        lines: list[str | None] = path.read_text().split("\n")
        tree = ast.parse("\n".join(lines), str(path))
        common = [node for node in ast.walk(tree) if is_common(node, path)]
        top = [node for node in tree.body if isinstance(node, Import)]
        code = [node for node in tree.body if node not in top and not is_string(node)]
        last = top[-1].end_lineno if top else 0
        if code and code[0].lineno < last:
            raise ValueError(f"{path}, line {code[0].lineno}: stands before an import; put it after them.")
        table = symtable.symtable(ast.unparse(ast.Module(code, [])), str(path), "exec")
        self.defined = [name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()]
        self.imports = [node for node in top if node not in common]
        self.needed = [node.module for node in top if node in common]
        self.needed_later = []
        for node in (node for node in common if node not in top):
            start = node.lineno - 1
            end = node.end_lineno
            if node.module.split(".")[-1] in without:
                lines[start] = " " * node.col_offset + refusal(node.module, lines[start - 1])
                start += 1
            else:
                self.needed_later.append(node.module)
                end += lines[end] == ""
            lines[start:end] = [None] * (end - start)
        self.head = lines[: top[0].lineno - 1 if top else 0]
        self.code = "\n".join(line for line in lines[last:] if line is not None).strip("\n")


def is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_common(node: ast.AST, path: Path) -> bool:
    """True for an import from `common/`."""
    if not isinstance(node, Import):
        return False
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    if not getattr(node, "level", 0) and all(module.split(".")[0] != "common" for module in modules):
        return False
    by_name = isinstance(node, ast.ImportFrom) and not any(alias.asname or alias.name == "*" for alias in node.names)
    if not by_name or not modules[0].startswith("common."):
        raise ValueError(f"{path}, line {node.lineno}: import names from common's files, each by its own name.")
    return True


def refusal(module: str, line_above: str) -> str:
    """What stands for the import of a file that is left out; it names the flag that is asked for one line above."""
    asked = re.search(r"\bargs\.(\w+)", line_above)
    flag = f"--{asked[1].replace('_', '-')}: " if asked else ""
    return f'raise BadInput("{flag}{module} is left out of this file; make it anew with tools/onefile.py.")'


def files_in_order(script: Source, root: Path, without: Sequence[str]) -> list[Source]:
    """The files of `common/` that a script uses, each after those that it needs at its top."""
    files: dict[str, Source] = {}
    ordered: list[Source] = []

    def add(modules: list[str], user: Path) -> None:
        for module in modules:
            if module not in files:
                path = root / f"{module.replace('.', '/')}.py"
                if path.stem in without:
                    raise ValueError(f"--without {path.stem}: it must stay, since {user} imports it at its top.")
                files[module] = Source(path, without)
                add(files[module].needed, path)
                ordered.append(files[module])

    add(script.needed, script.path)
    add(script.needed_later, script.path)
    for source in ordered:  # which grows
        add(source.needed_later, source.path)
    return ordered


def require_no_clash(sources: list[Source]) -> None:
    """Raise `ValueError` for a name that has two meanings."""
    meanings: dict[str, tuple[str, Path]] = {}
    for source in sources:
        names = [(name, str(source.path)) for name in source.defined]
        for node in source.imports:
            module = getattr(node, "module", "")
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]  # `import a` and `import a.b` agree
                names.append((name, f"{module} {alias.name if alias.asname else name}"))
        for name, meaning in names:
            known, path = meanings.setdefault(name, (meaning, source.path))
            if meaning != known:
                raise ValueError(f"names clash: {name} is in {path} and, as another, in {source.path}; rename one.")


def merged_imports(sources: list[Source]) -> list[str]:
    """All imports of other packages, as linters want them."""
    names: dict[str, set[str]] = {}
    for node in (node for source in sources for node in source.imports):
        names.setdefault(getattr(node, "module", ""), set()).update(map(ast.unparse, node.names))
    lines = [f"import {name}" for name in sorted(names.pop("", []))]
    for module in sorted(names.keys() - {"__future__"}):
        ordered = sorted(names[module], key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
        line = f"from {module} import {', '.join(ordered)}"
        if len(line) > WIDTH:
            line = f"from {module} import (" + "".join(f"\n    {name}," for name in ordered) + "\n)"
        lines.append(line)
    standard = [line for line in lines if re.split("[ .]", line)[1] in sys.stdlib_module_names]
    return [*standard, "", *(line for line in lines if line not in standard)]


def packages(root: Path) -> list[str]:
    """The packages above the first comment of requirements.txt, if there is one, as PEP 723 has them."""
    path = (root if (root / "requirements.txt").is_file() else ROOT) / "requirements.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.split(" #")[0].strip() for line in takewhile(lambda line: line[:1] != "#", lines)]
    names = [f"#     {json.dumps(name)}," for name in names if name and name[0] != "-"]  # no options of pip's
    head = ["# /// script", '# requires-python = ">=3.11"', "# dependencies = ["]
    return [*head, *names, "# ]", "# ///", ""] if names else []


def one_file(script: Path, name: str, without: Sequence[str] = ()) -> str:
    """The text of one file, to be called `name`, that does what `script` does."""
    folder = script.resolve().parent
    root = folder if (folder / "common").is_dir() else ROOT
    source = Source(script, without)
    files = files_in_order(source, root, without)
    require_no_clash([source, *files])
    note = f"One file, made by tools/onefile.py of {script.name} and the files of `common/` that it uses: copy it."
    head = [line.replace(script.name, name) for line in source.head]
    head = [note if line.startswith("To use it in a project of your own") else line for line in head]
    lines = [*packages(root), *head, "from __future__ import annotations", "", *merged_imports([source, *files])]
    sections = [f"# FROM {file.path.relative_to(root)}\n\n\n{file.code}\n\n\n" for file in files]
    text = "\n".join(lines) + "\n\n" + "".join(sections) + f"# FROM {script.name}\n\n\n{source.code}\n"
    ast.parse(text)
    for name in without:
        if f"{name} is left out of this file" not in text:
            raise ValueError(f"--without {name}: no file of that name is imported inside a function.")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--without", nargs="*", default=[], metavar="FILE")
    args = parser.parse_args()
    if args.target.exists():
        parser.error(f"{args.target} is there already; name a new file.")
    try:
        text = one_file(args.script, args.target.name, args.without)
        args.target.write_text(text)
    except (OSError, SyntaxError, ValueError) as error:
        parser.error(str(error))
    print(f"{args.target}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
