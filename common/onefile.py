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
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType

import tyro

from common.errors import BadInput

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
    imported: dict[str, set[str]] = field(default_factory=dict)  # name -> the imports that give it alone

    def __post_init__(self) -> None:
        text = self.path.read_text()
        self.lines, self.body = text.splitlines(), ast.parse(text, str(self.path)).body
        for statement in self.body:
            if not only_for_types(statement):
                self._check_imports(statement)
        for number, statement in enumerate(self.body):
            for name in names_made(statement):
                self.defined.setdefault(name, []).append(number)
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    text = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                    self.imported.setdefault(alias.asname or alias.name.split(".")[0], set()).add(text)
            elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
                for alias in statement.names:
                    module, name = statement.module or "", alias.asname or alias.name
                    if is_ours(module):
                        self.ours[name] = (module.removeprefix("common."), alias.name)
                    else:
                        text = f"from {module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                        self.imported[name] = {text}

    def _check_imports(self, statement: ast.stmt) -> None:
        """Raise `BadInput` for imports that cannot be followed."""
        folder = self.path.resolve().parent
        folder = COMMON.resolve().parent if folder.is_relative_to(COMMON.resolve()) else folder  # that of the script
        for node in ast.walk(statement):
            at = f"{self.path}, line {getattr(node, 'lineno', 0)}"
            plain = node is statement and isinstance(node, ast.ImportFrom)
            names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
            ours = isinstance(node, ast.Import) and any(is_ours(alias.name) for alias in names)
            ours |= isinstance(node, ast.ImportFrom) and is_ours(node.module or "")
            renamed = any(alias.asname for alias in names) or getattr(node, "module", "") == "common"
            if ours and (not plain or renamed):
                raise BadInput(f"{at}: import names from common's files one by one, at the top, by their own names.")
            if any(alias.name == "*" for alias in names) or getattr(node, "level", 0):
                raise BadInput(f"{at}: import names one by one, from modules by their full names.")
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in names]
            for module in (module.split(".")[0] for module in modules):
                if module != "common" and is_beside(module, folder):
                    raise BadInput(
                        f"{at}: the module {module} stands beside the script, and the new file would still need it. "
                        f"Move it into common/ (from common.{module} import ...), or copy what you use into the script."
                    )

    @property
    def effects(self) -> list[int]:
        """The statements that do something when the file is imported, beside defining names one by one."""
        simple = ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom
        doc = [n for n, s in enumerate(self.body[:1]) if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
        numbers = (n for n, s in enumerate(self.body) if not isinstance(s, simple) and not only_for_types(s))
        return [number for number in numbers if number not in doc]

    def text(self, number: int) -> list[str]:
        """The lines of a statement, with the comments that stand right above it."""
        statement = self.body[number]
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]) - 1
        while first > 0 and self.lines[first - 1].startswith("#"):
            first -= 1
        return self.lines[first : statement.end_lineno]


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "common"


def is_beside(module: str, folder: Path) -> bool:
    """True if Python, started with a script of this folder, takes the module from there."""
    spec = PathFinder.find_spec(module, [str(folder), *sys.path])
    places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
    return any(Path(place).parent == folder for place in places if place)


def only_for_types(statement: ast.stmt) -> bool:
    """True for `if TYPE_CHECKING:`."""
    return isinstance(statement, ast.If) and getattr(statement.test, "id", "") == "TYPE_CHECKING"


def names_made(statement: ast.stmt) -> list[str]:
    """What a statement of the top level defines or changes, alone or in a block; imports of the top level aside."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom) or only_for_types(statement):
        return []
    made = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made += [alias.asname or alias.name.split(".")[0] for alias in node.names]
    return list(dict.fromkeys(made))


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

    Raises `BadInput` where two parts have the same name, for imports that it does not understand, and for those of a
    module beside the script.
    """
    sources, wanted, imports, order = {"": Source(script)}, {}, {}, []

    def want(module: str, number: int) -> None:
        """Take a statement, and first what it needs."""
        source = sources[module]
        if module not in wanted:
            wanted[module] = set()
            for effect in source.effects:
                want(module, effect)
        if number in wanted[module]:
            return
        wanted[module].add(number)
        for read in sorted(names_read(source.body[number])):
            if read in source.ours:
                other, there = source.ours[read]
                if other not in sources:
                    sources[other] = Source(COMMON / f"{other.replace('.', '/')}.py")
                if there not in sources[other].defined:
                    raise BadInput(
                        f"{source.path}: {there} is not made in {sources[other].path}; import it from where it is."
                    )
                for needed in sources[other].defined[there]:
                    want(other, needed)
            elif read in source.defined:
                for needed in source.defined[read]:
                    want(module, needed)
            elif read in source.imported:
                take(read, source)
        if module not in order:
            order.append(module)

    def take(name: str, source: Source) -> None:
        """Take what a file imports under a name; `import a` and `import a.b` agree."""
        lines, path = imports.setdefault(name, (set(), source.path))
        lines |= source.imported[name]
        if len(lines) > 1 and any(not line.startswith("import ") or " as " in line for line in lines):
            raise clash(name, path, source.path)

    own = sources[""]
    for name_imported in own.imported:  # all: some are imported for what that does
        take(name_imported, own)
    start = 1 if ast.get_docstring(ast.Module(own.body, [])) else 0
    parts = [n for n, s in enumerate(own.body) if n >= start and not isinstance(s, ast.Import | ast.ImportFrom)]
    last = max((s.end_lineno for s in own.body if isinstance(s, ast.Import | ast.ImportFrom)), default=0)
    if own.body[parts[0]].lineno < last:
        raise BadInput(f"{script}, line {own.body[parts[0]].lineno}: stands before an import; put it after them.")
    for number in parts:
        want("", number)
    where = {name: path for name, (_, path) in imports.items()}
    for module, source in sources.items():
        for made, numbers in source.defined.items():
            if wanted[module].issuperset(numbers):
                if made in where:
                    raise clash(made, where[made], source.path)
                where[made] = source.path
    text = [
        *docstring(own, name),
        FUTURE,
        "",
        *sorted_imports([line for lines, _ in imports.values() for line in lines]),
    ]
    modules = ranked([module for module in order if module], sources)
    for module in modules:
        text += [*[""] * (1 if module == modules[0] else 2), f"# FROM common/{module.replace('.', '/')}.py"]
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
