"""tools/onefile.py: a script and what it uses of common/ as one file, which does the same alone."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from runs import ROOT, edited, finish, run, same_run, start
from tools.onefile import one_file

CASES = {
    "ppo_ddp.py": (2, "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-every 512 --eval-episodes 3"),
    "dqn_ddp.py": (1, "--learning-starts 500 --total-timesteps 800 --prioritized --eval-every 400 --eval-episodes 3"),
}


def onefile(*words: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "tools/onefile.py", *words], cwd=ROOT, capture_output=True, text=True)


def made(script: str, folder: Path, *words: str) -> Path:
    done = onefile(script, folder / "mine.py", *words)
    assert done.returncode == 0 and done.stdout.startswith(f"{folder / 'mine.py'}: "), done.stderr
    return folder / "mine.py"


def changed(*edits: tuple[str, str]) -> str:
    return edited("ppo_ddp.py", (ROOT / "ppo_ddp.py").read_text(), *edits)


@pytest.mark.parametrize("script", ["ppo_ddp.py", "ppg_ddp.py", "dqn_ddp.py", "sac_ddp.py"])
def test_every_script_becomes_one_file_that_starts(script, tmp_path):
    """No two names of the parts clash; the file's --help is the script's."""
    done = subprocess.run([sys.executable, made(script, tmp_path), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--env-id" in done.stdout, done.stderr


@pytest.mark.parametrize("script", ["ppo_ddp.py", pytest.param("dqn_ddp.py", marks=pytest.mark.slow)])
def test_one_file_gives_the_scripts_bytes(script, tmp_path):
    """In an empty folder with nothing else to import; as linters and formatters want it; only with files it uses."""
    path, (size, flags) = made(script, tmp_path), CASES[script]
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "--config", str(ROOT / "pyproject.toml"), path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    text = path.read_text()
    lines = text.splitlines()
    end = lines.index("# ///")
    asked = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines[1:end]))["dependencies"]
    assert asked == (ROOT / "requirements.txt").read_text().split("\n#")[0].splitlines()
    files = [line.removeprefix("# FROM ") for line in lines if line.startswith("# FROM ")]
    assert len(set(files)) == len(files) and files[-1] == script
    assert "from common" not in text and "import common" not in text
    assert ("class ReplayBuffer" in text) == (script == "dqn_ddp.py")
    assert (ROOT / script).read_text().split("\n\n\n", 1)[1] in text, "the script's own part is not as it stands"
    flags = f"{flags} --shards 2 --save-model"
    alone = finish(start(path, size, f"{flags} --run-dir run", cwd=tmp_path, PYTHONPATH=""), tmp_path / "run")
    assert alone.code == 0, alone.err
    assert same_run(alone, run(script, 1, flags, tmp_path / "calm", dtype="float32")) == ""


def test_a_file_that_is_left_out_is_refused_by_the_copy_in_one_line(tmp_path):
    """Its packages and code are gone; all else runs."""
    path = made("ppo_ddp.py", tmp_path, "--without", "pool", "video")
    assert "# FROM common/pool.py" not in path.read_text() and "batch_space" not in path.read_text()
    refused = finish(start(path, 1, "--env-id envpool/CartPole-v1", cwd=tmp_path, PYTHONPATH=""), tmp_path)
    needed = "common.pool is left out of this file; make it anew with tools/onefile.py."
    assert refused.code == 2 and refused.err == f"error: --env-id envpool/CartPole-v1: {needed}\n"
    refused = finish(start(path, 1, "--capture-video", cwd=tmp_path, PYTHONPATH=""), tmp_path)
    assert refused.code == 2 and "error: --capture-video: common.run.video is left out of this file" in refused.err
    flags = "--total-timesteps 512 --eval-every 0 --run-dir run"
    assert finish(start(path, 1, flags, cwd=tmp_path, PYTHONPATH=""), tmp_path / "run").code == 0
    kept = onefile("ppo_ddp.py", tmp_path / "other.py", "--without", "acting")
    assert kept.returncode == 2 and "--without acting: it must stay, since ppo_ddp.py imports it" in kept.stderr
    unknown = onefile("ppo_ddp.py", tmp_path / "other.py", "--without", "nothing")
    assert unknown.returncode == 2 and "--without nothing: no file of that name" in unknown.stderr


def test_it_overwrites_nothing(tmp_path):
    path = made("ppo_ddp.py", tmp_path)
    before = path.read_bytes()
    done = onefile("ppo_ddp.py", path)
    assert done.returncode == 2 and f"{path} is there already; name a new file." in done.stderr
    assert path.read_bytes() == before
    assert onefile("nothing.py", tmp_path / "new.py").returncode == 2


FORM = r"edited\.py, line \d+: import names from common's files, each by its own name"
REFUSED = {
    "from common.distributed import World as c": FORM,
    "from common import distributed": FORM,
    "def f():\n    import common.distributed": FORM,
    "x = 1\nfrom common.distributed import World": r"edited\.py, line \d+: stands before an import",
    "from math import pi as World": r"^names clash: World is in .*edited\.py and, as another, in .*distributed\.py",
}


@pytest.mark.parametrize("import_", REFUSED)
def test_what_cannot_be_one_file_is_refused(import_, tmp_path):
    script = tmp_path / "edited.py"
    script.write_text(changed(("from common.encoders import Pixels, image_encoder\n", f"{import_}\n")))
    with pytest.raises(ValueError, match=REFUSED[import_]):
        one_file(script, "mine.py")


def test_what_a_script_does_when_imported_stays(tmp_path):
    """Imports for what they do, settings made at the top, a name made in a block, modules of one package.

    And what a file of `common/` does, of which the script takes something else.
    """
    shutil.copytree(ROOT / "common", tmp_path / "common")
    with open(tmp_path / "common" / "run" / "loop.py", "a") as file:
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
