"""A script and the files of `common/` that it uses, as one file that needs no folder beside it.

    python -m common.onefile ppo_ddp.py my_ppo.py

The files come first, each whole and under its name, then the script as it stands. At the top stand the packages that it
needs, for `uv run my_ppo.py` (PEP 723), and a table of contents. Works on your own copies too.
"""

from __future__ import annotations

import ast
import json
import re
import symtable
import sys
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path

import tyro

from common.errors import BadInput

COMMON = Path(__file__).parent
FUTURE = "from __future__ import annotations"
WIDTH = 120
IMPORT = ast.Import | ast.ImportFrom


class Source:
    """A file: `head`, the lines above its imports; `imported`; `code`, all below; `made`, the names defined there.

    `folder`: where Python looks for modules first. Raises `BadInput` for code above an import, and for an import that
    cannot be followed.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        text = path.read_text()
        body, lines = ast.parse(text, str(path)).body, text.split("\n")
        imports = [statement for statement in body if isinstance(statement, IMPORT)]
        first, last = (imports[0].lineno, imports[-1].end_lineno) if imports else (1, 0)
        self.path, self.head, self.code = path, lines[: first - 1], "\n".join(lines[last:]).strip("\n")
        code = [statement for statement in body if statement not in imports and not is_string(statement)]
        executed = [statement for statement in code if not is_type_checking(statement)]
        for statement in imports + executed:
            for node in ast.walk(statement):
                if isinstance(node, IMPORT):
                    require_clear(node, f"{path}, line {node.lineno}", folder, node in imports)
        if code and code[0].lineno < last:
            raise BadInput(f"{path}, line {code[0].lineno}: stands before an import; put it after them.")
        table = symtable.symtable(ast.unparse(ast.Module(executed, [])), str(path), "exec")
        self.made = {name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()}
        self.imported = [(getattr(node, "module", ""), alias) for node in imports for alias in node.names]


def is_string(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and getattr(statement.test, "id", "") == "TYPE_CHECKING"


def require_clear(node: ast.Import | ast.ImportFrom, place: str, folder: Path, at_top: bool) -> None:
    """Raise `BadInput`, with the place, for an import that cannot be followed."""
    if getattr(node, "level", 0) or any(alias.name == "*" for alias in node.names):
        raise BadInput(f"{place}: import names one by one, from modules by their full names.")
    by_name = at_top and isinstance(node, ast.ImportFrom) and not any(alias.asname for alias in node.names)
    for module in [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
        package = module.split(".")[0]
        if package == "common" and (module == "common" or not by_name):
            raise BadInput(f"{place}: import names from common's files one by one, at the top, by their own names.")
        if package != "common" and is_beside(package, folder):
            raise BadInput(
                f"{place}: the module {package} stands beside the script, and the new file would still need it. "
                f"Move it into common/ (from common.{package} import ...), or copy what you use into the script."
            )


def is_beside(package: str, folder: Path) -> bool:
    """True if Python, started with a script of this folder, takes the package from there."""
    spec = PathFinder.find_spec(package, [str(folder), *sys.path])
    places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
    return any(Path(place).parent == folder for place in places if place)


def read_files(source: Source, files: dict[str, Source]) -> None:
    """Add to `files`, by module, the files of `common/` that `source` imports, each after those that it imports itself.

    Raises `BadInput` for a name that is imported from a file which does not define it.
    """
    for module, alias in source.imported:
        if not module.startswith("common."):
            continue
        if module not in files:
            files[module] = Source(COMMON.parent / f"{module.replace('.', '/')}.py", COMMON.resolve().parent)
            read_files(files[module], files)
            files[module] = files.pop(module)  # now the last
        if alias.name not in files[module].made:
            where = files[module].path
            raise BadInput(f"{source.path}: {alias.name} is not made in {where}; import it from where it is.")


def other_imports(sources: list[Source]) -> set[tuple[str, str]]:
    """All imports of modules outside `common/`: ("torch", "nn") for `from torch import nn`, ("", "torch") for `import`.

    Raises `BadInput` where a name has two meanings.
    """
    imports, meanings = set(), {}
    for source in sources:
        names = [(name, source.path) for name in sorted(source.made)]
        for module, alias in source.imported:
            if not module.startswith("common.") and module != "__future__":
                imports.add((module, ast.unparse(alias)))
                name = alias.asname or alias.name.split(".")[0]
                meaning = (module, alias.name) if module or alias.asname else name
                names.append((name, meaning))  # `import a` and `import a.b` agree
        for name, meaning in names:
            known, path = meanings.setdefault(name, (meaning, source.path))
            if meaning != known:
                raise BadInput(f"names clash: {name} is in {path} and, as another, in {source.path}; rename one.")
    return imports


def import_lines(imports: set[tuple[str, str]]) -> list[str]:
    """Imports as linters want them: Python's own before others, `import` before `from`, a module's names at once."""
    lines = [f"import {name}" for module, name in sorted(imports) if not module]
    for module in sorted({module for module, _ in imports if module}):
        names = [name for other, name in imports if other == module]
        names.sort(key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
        line = f"from {module} import {', '.join(names)}"
        if len(line) > WIDTH:
            line = f"from {module} import (" + "".join(f"\n    {name}," for name in names) + "\n)"
        lines.append(line)
    pythons = [line for line in lines if re.split("[ .]", line)[1] in sys.stdlib_module_names]
    return [*pythons, "", *(line for line in lines if line not in pythons)]


def metadata() -> list[str]:
    """The packages above the first comment of requirements.txt, where it is there, as PEP 723 has them."""
    path = COMMON.parent / "requirements.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    lines = [line.split(" #")[0].strip() for line in takewhile(lambda line: line[:1] != "#", lines)]
    packages = [f"#     {json.dumps(line)}," for line in lines if line and line[0] != "-"]  # no options of pip's
    head = ["# /// script", '# requires-python = ">=3.11"', "# dependencies = ["]
    return [*head, *packages, "# ]", "# ///", ""] if packages else []


def one_file(script: Path, name: str) -> str:
    """The text of one file that does what `script` does; `name` is what that file is to be called.

    Raises `BadInput` for imports that it does not understand, for those of a module beside the script, for code above
    an import, and where a name has two meanings.
    """
    source, files = Source(script, script.resolve().parent), {}
    read_files(source, files)
    said = f"One file, made by common.onefile of {script.name} and the files of `common/` that it uses: copy it."
    packages = metadata()
    said += f"\n`uv run {name}` installs the packages above and runs it." if packages else ""
    head = [
        said if line.startswith("To use it in a project of your own") else line.replace(script.name, name)
        for line in source.head
    ]
    text = "\n".join([*head, FUTURE, "", *import_lines(other_imports([source, *files.values()]))]) + "\n\n"
    shared, algorithm = [], []  # lines, counted from 0, and what begins there
    for module, file in files.items():
        title = f"{module.replace('.', '/')}.py"
        shared.append((text.count("\n"), title))
        text += f"# FROM {title}\n\n\n{file.code}\n\n\n"
    for number, line in enumerate(source.code.split("\n"), text.count("\n")):
        if found := re.match(r"(?:class|def) (\w+)", line):
            algorithm.append((number, found[1]))
    above = len(packages) + len(algorithm) + len(shared) + 3
    table = [[f"# {number + above + 1:5} {what}" for number, what in rows] for rows in (algorithm, shared)]
    contents = ["# Lines of the algorithm:", *table[0], "# Lines of the shared parts:", *table[1], ""]
    return "\n".join([*packages, *contents, text]) + source.code + "\n"


def main(script: tyro.conf.Positional[Path], target: tyro.conf.Positional[Path]) -> None:
    """Write TARGET, one file that does what SCRIPT does, without a folder beside it."""
    if not script.is_file():
        raise BadInput(f"SCRIPT {script}: is not there; name one, such as ppo_ddp.py.")
    if target.exists():
        raise BadInput(f"TARGET {target}: is there already; name a new file.")
    try:
        text = one_file(script, target.name)
        target.write_text(text)
    except (OSError, SyntaxError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"{error.filename or script}: {reason}") from error
    print(f"{target}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
