"""A script and the parts of `common/` that it uses, as one file that needs no folder beside it.

    python -m common.onefile ppo_ddp.py my_ppo.py

The parts come first, each under the name of its file, then the script as it stands. Works on your own copies too.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import tyro

from common.launch import BadInput

COMMON = Path(__file__).parent
FUTURE = "from __future__ import annotations"
WIDTH = 120


@dataclass
class Source:
    """A file's statements, and what each name of its top level is: defined here, ours from elsewhere, or imported."""

    path: Path
    lines: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)
    defined: dict[str, list[int]] = field(default_factory=dict)  # name -> the statements that make it
    ours: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> a file of common/, its name there
    imported: dict[str, str] = field(default_factory=dict)  # name -> the import that gives it alone

    def __post_init__(self) -> None:
        text = self.path.read_text()
        self.lines, self.body = text.splitlines(), ast.parse(text).body
        for number, statement in enumerate(self.body):
            for name in names_made(statement):
                self.defined.setdefault(name, []).append(number)
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    text = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                    self.imported[alias.asname or alias.name.split(".")[0]] = text
            elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
                for alias in statement.names:
                    module, name = statement.module or "", alias.asname or alias.name
                    if module.split(".")[0] != "common":
                        text = f"from {module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                        self.imported[name] = text
                    elif alias.asname or module == "common":
                        where = f"{self.path}, line {statement.lineno}"
                        raise BadInput(f"{where}: import names from common's files one by one, by their own names.")
                    else:
                        self.ours[name] = (module.removeprefix("common."), alias.name)

    def text(self, number: int) -> list[str]:
        """The lines of a statement, with the comments that stand right above it."""
        statement = self.body[number]
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]) - 1
        while first > 0 and self.lines[first - 1].startswith("#"):
            first -= 1
        return self.lines[first : statement.end_lineno]


def names_made(statement: ast.stmt) -> list[str]:
    """What a statement of the top level defines or changes."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    if isinstance(statement, ast.AnnAssign | ast.AugAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def names_read(statement: ast.stmt) -> set[str]:
    """The names of the top level that a statement reads, now or when what it defines is called or inspected."""
    code = compile(ast.Module([statement], []), "", "exec", flags=annotations.compiler_flag, dont_inherit=True)
    notes = {
        node.id
        for part in ast.walk(statement)
        for note in (getattr(part, "annotation", None), getattr(part, "returns", None))
        if isinstance(note, ast.AST)
        for node in ast.walk(note)
        if isinstance(node, ast.Name)
    }
    return notes | set(loads(code))


def loads(code: CodeType) -> Iterator[str]:
    """The names that a piece of code takes from its module, or from Python itself."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from loads(constant)


def one_file(script: Path, name: str) -> str:
    """The text of one file that does what `script` does; `name` is what that file is to be called.

    Raises `BadInput` where two parts have the same name, and for imports that it does not understand.
    """
    sources, wanted, imports, order = {"": Source(script)}, {}, {}, []

    def want(module: str, number: int) -> None:
        """Take a statement, and first what it needs."""
        if number in wanted.setdefault(module, set()):
            return
        wanted[module].add(number)
        source = sources[module]
        for read in sorted(names_read(source.body[number])):
            if read in source.ours:
                other, there = source.ours[read]
                if other not in sources:
                    sources[other] = Source(COMMON / f"{other}.py")
                for needed in sources[other].defined[there]:
                    want(other, needed)
            elif read in source.defined:
                for needed in source.defined[read]:
                    want(module, needed)
            elif read in source.imported:
                if imports.setdefault(read, (source.imported[read], source.path))[0] != source.imported[read]:
                    raise clash(read, imports[read][1], source.path)
        if module not in order:
            order.append(module)

    own = sources[""]
    start = 1 if ast.get_docstring(ast.Module(own.body, [])) else 0
    parts = [n for n, s in enumerate(own.body) if n >= start and not isinstance(s, ast.Import | ast.ImportFrom)]
    for number in parts:
        want("", number)
    where = {name: path for name, (_, path) in imports.items()}
    for module, source in sources.items():
        for made, numbers in source.defined.items():
            if wanted[module].issuperset(numbers):
                if made in where:
                    raise clash(made, where[made], source.path)
                where[made] = source.path
    text = [*docstring(own, name), FUTURE, "", *sorted_imports([line for line, _ in imports.values()])]
    modules = ranked([module for module in order if module], sources)
    for module in modules:
        text += [*[""] * (1 if module == modules[0] else 2), f"# FROM common/{module}.py"]
        before = None
        for number in sorted(wanted[module]):
            gap = 2
            if before == number - 1:
                gap = min(2, blank_lines(sources[module], number))
            text += [""] * gap + sources[module].text(number)
            before = number
    first = own.text(parts[0])
    return "\n".join([*text, "", "", *first, *own.lines[own.body[parts[0]].end_lineno :]]) + "\n"


def clash(name: str, one: Path, other: Path) -> BadInput:
    return BadInput(f"names clash: {name} is in {one} and, as another, in {other}; rename one.")


def ranked(modules: list[str], sources: dict[str, Source]) -> list[str]:
    """Modules, each after those that it imports."""
    done: list[str] = []

    def add(module: str) -> None:
        if module not in done and module in modules:
            for other, _ in sources[module].ours.values():
                add(other)
            done.append(module)

    for module in sorted(modules):
        add(module)
    return done


def blank_lines(source: Source, number: int) -> int:
    """How many blank lines stand between a statement and the one before."""
    end = source.body[number - 1].end_lineno
    between = source.lines[end : source.body[number].lineno - 1]
    return sum(not line.strip() for line in between)


def docstring(source: Source, name: str) -> list[str]:
    """The script's, with the new name and what the file is."""
    if not ast.get_docstring(ast.Module(source.body, [])):
        return []
    lines = [line.replace(source.path.name, name) for line in source.lines[: source.body[0].end_lineno]]
    said = f"One file, made by common.onefile of {source.path.name} and the parts of `common/` that it uses: copy it."
    return [said if line.startswith("To use it in a project of your own") else line for line in lines] + [""]


def sorted_imports(lines: list[str]) -> list[str]:
    """Imports as linters want them: Python's own, a blank line, others; plain ones first, a module's names joined."""
    plain, members = {line for line in lines if line.startswith("import ")}, {}
    for line in set(lines) - plain:
        module, _, name = line.removeprefix("from ").partition(" import ")
        members.setdefault(module, []).append(name)
    sections: list[list[str]] = [[], []]
    for line in sorted(plain, key=lambda line: (line.split()[1], line)):
        sections[line.split()[1].split(".")[0] not in sys.stdlib_module_names].append(line)
    for module, names in sorted(members.items()):
        names.sort(key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
        line = f"from {module} import {', '.join(names)}"
        section = sections[module.split(".")[0] not in sys.stdlib_module_names]
        section += [line] if len(line) <= WIDTH else [f"from {module} import (", *(f"    {n}," for n in names), ")"]
    return [*sections[0], *([""] if all(sections) else []), *sections[1]]


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
