"""A script and the files of `common/` that it uses, as one file that needs no folder beside it.

    python tools/onefile.py ppo_ddp.py my_ppo.py
    python tools/onefile.py ppo_ddp.py my_ppo.py --without pool video

The files come first, each under its name and after those that it needs; then the script. At the top stand the packages
that it needs, for `uv run my_ppo.py` (PEP 723). Works on your own copies too: the `common/` beside the script is taken.
`--without`: files to leave out, of those that are imported inside a function; who asks for one is told so.
"""

import argparse
import ast
import json
import re
import symtable
import sys
from collections import defaultdict
from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
Import = ast.Import | ast.ImportFrom


class Source:
    """A file: `head`, the lines above its imports; `imports`, those of other packages; `code`, all below.

    `needed`: the modules of `common/` that it imports at its top. `needed_later`: inside functions, where the imports
    are cut out; of those of `without`, an error replaces the rest of the block. `defined`: the names made at its top.
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
        self.needed = []
        self.needed_later = []
        for node in common:
            name = node.module.split(".")[-1]
            start = node.lineno - 1
            end = node.end_lineno
            if node in top:
                self.needed.append(node.module)
                if name in without:
                    raise ValueError(f"--without {name}: it must stay, since {path} imports it at its top.")
            elif lines[start] is None:
                continue
            elif name in without:
                fields = [x for parent in ast.walk(tree) for _, x in ast.iter_fields(parent)]
                end = next(block[-1].end_lineno for block in fields if isinstance(block, list) and node in block)
                lines[start:end] = [refusal(node, lines[start - 1])] + [None] * (end - start - 1)
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
    by_name = isinstance(node, ast.ImportFrom) and not any(alias.asname or alias.name == "*" for alias in node.names)
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    if not getattr(node, "level", 0) and all(module.split(".")[0] != "common" for module in modules):
        return False
    if not by_name or not modules[0].startswith("common."):
        raise ValueError(f"{path}, line {node.lineno}: import names from common's files, each by its own name.")
    return True


def refusal(node: ast.ImportFrom, line_above: str) -> str:
    """What stands for the import of a file that is left out; it names the flag that is asked for one line above."""
    asked = re.search(r"\bargs\.(\w+)", line_above)
    flag = f"--{asked[1].replace('_', '-')}: " if asked else ""
    fault = f"{flag}{node.module} was left out of this file (tools/onefile.py)."
    return f'{" " * node.col_offset}raise BadInput("{fault}")'


def files_of(script: Source, root: Path, without: Sequence[str]) -> list[Source]:
    """The files of `common/` that a script uses, each after those that it needs at its top."""
    files: dict[str, Source] = {}
    sources = [script]
    for source in sources:  # which grows
        for module in source.needed + source.needed_later:
            if module not in files:
                files[module] = Source(root / f"{module.replace('.', '/')}.py", without)
                sources.append(files[module])
    order = TopologicalSorter({name: source.needed for name, source in files.items()})
    return [files[name] for name in order.static_order()]


def require_no_clash(sources: list[Source]) -> None:
    """Raise `ValueError` for a name that has two meanings."""
    meanings: dict[str, tuple[str, Path]] = {}
    for source in sources:
        names = [(name, str(source.path)) for name in source.defined]
        for node in source.imports:
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]  # `import a` and `import a.b` agree
                names.append((name, f"{getattr(node, 'module', '')} {alias.name if alias.asname else name}"))
        for name, meaning in names:
            known, path = meanings.setdefault(name, (meaning, source.path))
            if meaning != known:
                raise ValueError(f"names clash: {name} is in {path} and, as another, in {source.path}; rename one.")


def merged_imports(sources: list[Source]) -> list[str]:
    """All imports of other packages, as linters want them."""
    names: dict[str, set[str]] = defaultdict(set)
    for node in (node for source in sources for node in source.imports):
        names[getattr(node, "module", "")].update(map(ast.unparse, node.names))
    lines = [f"import {name}" for name in sorted(names.pop("", []))]
    for module in sorted(names):
        ordered = sorted(names[module], key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
        line = f"from {module} import {', '.join(ordered)}"
        if len(line) > WIDTH:
            line = f"from {module} import (" + "".join(f"\n    {name}," for name in ordered) + "\n)"
        lines.append(line)
    standard = [line for line in lines if re.split("[ .]", line)[1] in sys.stdlib_module_names]
    return [*standard, "", *(line for line in lines if line not in standard)]


def packages() -> list[str]:
    """The packages above the first comment of requirements.txt, as PEP 723 has them."""
    lines = takewhile(lambda line: line[:1] != "#", (ROOT / "requirements.txt").read_text().splitlines())
    names = [f"#     {json.dumps(line.split(' #')[0].strip())}," for line in lines if line.strip()]
    return ["# /// script", '# requires-python = ">=3.11"', "# dependencies = [", *names, "# ]", "# ///", ""]


def one_file(script: Path, name: str, without: Sequence[str] = ()) -> str:
    """The text of one file, to be called `name`, that does what `script` does."""
    folder = script.resolve().parent
    root = folder if (folder / "common").is_dir() else ROOT
    source = Source(script, without)
    files = files_of(source, root, without)
    require_no_clash([source, *files])
    note = f"One file, made by tools/onefile.py of {script.name} and the files of `common/` that it uses: copy it."
    head = [line.replace(script.name, name) for line in source.head]
    head = [note if line.startswith("To use it in a project of your own") else line for line in head]
    lines = [*packages(), *head, *merged_imports([source, *files])]
    sections = [f"# FROM {file.path.relative_to(root)}\n\n\n{file.code}\n\n\n" for file in files]
    text = "\n".join(lines) + "\n\n" + "".join(sections) + f"# FROM {script.name}\n\n\n{source.code}\n"
    for name in without:
        if f"{name} was left out of this file" not in text:
            raise ValueError(f"--without {name}: no file of that name is imported inside a function.")
    compile(text, name, "exec")  # raises where an import cannot stand there, such as of __future__
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
    for name in sorted({name.split(".")[0] for name in re.findall(r"^(?:from|import) ([\w.]+)", text, re.MULTILINE)}):
        if (args.script.resolve().parent / f"{name}.py").exists() or (args.script.resolve().parent / name).is_dir():
            print(f"it imports {name}, which must lie beside it")


if __name__ == "__main__":
    main()
