"""tools/onefile.py: a script and what it uses of common/ as one file, which does the same alone."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from runs import ROOT, edited, finish, run, same_run, start
from tools.onefile import one_file

REPLAY = "--learning-starts 100 --total-timesteps 200 --eval-every 0 --checkpoint-every 160"
CASES = {
    "ppo_ddp.py": (2, "--num-steps 32 --total-timesteps 256 --eval-every 128 --eval-episodes 3"),
    "ppg_ddp.py": (1, "--num-steps 32 --total-timesteps 512 --eval-every 0 --n-pi 2 --num-aux-minibatches 4"),
    "dqn_ddp.py": (1, f"{REPLAY} --prioritized"),
    "sac_ddp.py": (1, REPLAY),
}


def onefile(*words: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "tools/onefile.py", *words], cwd=ROOT, capture_output=True, text=True)


def made(script: str, folder: Path, *words: str) -> Path:
    done = onefile(script, folder / "mine.py", *words)
    assert done.returncode == 0 and done.stdout.startswith(f"{folder / 'mine.py'}: "), done.stderr
    return folder / "mine.py"


@pytest.mark.parametrize("script", CASES)
def test_one_file_gives_the_scripts_bytes(script, tmp_path):
    """In an empty folder with nothing else to import."""
    size, flags = CASES[script]
    flags = f"{flags} --num-envs 4 --shards 2 --save-model"
    path = made(script, tmp_path)
    alone = finish(start(path, size, f"{flags} --run-dir run", cwd=tmp_path, PYTHONPATH=""), tmp_path / "run")
    assert alone.code == 0, alone.err
    assert same_run(alone, run(script, 1, flags, tmp_path / "calm", dtype="float32")) == ""


def test_one_file_is_as_linters_want_it_and_holds_only_what_it_uses(tmp_path):
    path = made("ppo_ddp.py", tmp_path)
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "--config", str(ROOT / "pyproject.toml"), path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    text = path.read_text()
    lines = text.splitlines()
    asked = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines[1 : lines.index("# ///")]))
    assert asked["dependencies"] == (ROOT / "requirements.txt").read_text().split("\n#")[0].splitlines()
    files = [line.removeprefix("# FROM ") for line in lines if line.startswith("# FROM ")]
    assert len(set(files)) == len(files) and files[-1] == "ppo_ddp.py" and "common/replay.py" not in files
    assert "from common" not in text and "import common" not in text
    assert (ROOT / "ppo_ddp.py").read_text().split("\n\n\n", 1)[1] in text, "the script's own part is not as it stands"


def test_a_file_that_is_left_out_is_refused_by_the_copy_in_one_line(tmp_path):
    """Its code is gone; all else runs."""
    files = ("pool", "video", "checkpoint")
    path = made("ppo_ddp.py", tmp_path, "--without", *files)
    assert not any(f"# FROM common/{name}.py" in path.read_text() for name in files)

    def ended(flags: str):
        return finish(start(path, 1, flags, cwd=tmp_path, PYTHONPATH=""), tmp_path)

    needed = "common.checkpoint was left out of this file (tools/onefile.py)."
    refused = ended("--checkpoint-every 512")
    assert refused.code == 2 and refused.err == f"error: --checkpoint-every: {needed}\n"
    assert ended("--total-timesteps 512 --eval-every 0").code == 0
    for name, target, fault in (
        ("acting", tmp_path / "other.py", "--without acting: it must stay, since "),
        ("nothing", tmp_path / "other.py", "--without nothing: no file of that name"),
        ("video", path, f"{path} is there already; name a new file."),
    ):
        done = onefile("ppo_ddp.py", target, "--without", name)
        assert done.returncode == 2 and fault in done.stderr


def changed(*edits: tuple[str, str]) -> str:
    return edited("ppo_ddp.py", (ROOT / "ppo_ddp.py").read_text(), *edits)


FORM = r"edited\.py, line \d+: import names from common's files, each by its own name"
REFUSED = {
    "from common.processes import World as c": FORM,
    "from common import processes": FORM,
    "def f():\n    import common.processes": FORM,
    "x = 1\nfrom common.processes import World": r"edited\.py, line \d+: stands before an import",
    "from __future__ import annotations": r"from __future__ imports must occur at the .*\(mine\.py, line \d+\)",
    "from math import pi as World": r"^names clash: World is in .*edited\.py and, as another, in .*processes\.py",
}


@pytest.mark.parametrize("import_", REFUSED)
def test_what_cannot_be_one_file_is_refused(import_, tmp_path):
    script = tmp_path / "edited.py"
    script.write_text(changed(("from common.encoders import image_encoder\n", f"{import_}\n")))
    with pytest.raises((SyntaxError, ValueError), match=REFUSED[import_]):
        one_file(script, "mine.py")


def test_what_a_script_does_when_imported_stays(tmp_path):
    """Imports, settings and names made at the top; and what a file of `common/` does, of which it takes something."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    with open(tmp_path / "common" / "run.py", "a") as file:
        file.write("\n\nif crossed(2, 1, 2):\n    SETTING = 1\n")
    added = 'os.environ["A"] = "1"\ntry:\n    import numba\nexcept ImportError:\n    numba = None\n\n\n@dataclass'
    imports = "import my_envs  # noqa: F401\nimport os\nimport torch.nn.functional\nimport torch\n"
    script = tmp_path / "edited.py"
    script.write_text(changed(("\nimport torch\n", f"\n{imports}"), ("\n@dataclass", f"\n{added}")))
    text = one_file(script, "mine.py")
    lines = ("import my_envs", "import torch.nn.functional", 'os.environ["A"] = "1"', "    numba = None")
    for line in (*lines, "    SETTING = 1"):
        assert text.count(f"\n{line}\n") == 1, line
    compile(text, "mine.py", "exec")
