"""common.onefile: a script and what it uses of common/ as one file, which does the same alone."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import common.onefile
from common.errors import BadInput
from common.onefile import one_file
from runs import ROOT, edited, finish, flat, run, start

CASES = {
    "ppo_ddp.py": (
        2,
        "--num-envs 4 --num-steps 32 --total-timesteps 1024 --eval-every 512 --eval-episodes 3",
    ),
    "ppg_ddp.py": (1, "--num-envs 4 --num-steps 32 --n-pi 2 --total-timesteps 1024 --eval-every 512 --eval-episodes 3"),
    "dqn_ddp.py": (1, "--learning-starts 500 --total-timesteps 800 --prioritized --eval-every 400 --eval-episodes 3"),
    "sac_ddp.py": (1, "--learning-starts 500 --total-timesteps 600 --eval-every 0"),
}


def made(script: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "common.onefile", script, str(folder / "mine.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"{folder / 'mine.py'}: "), done.stderr
    return folder / "mine.py"


def changed(*edits: tuple[str, str]) -> str:
    return edited("ppo_ddp.py", (ROOT / "ppo_ddp.py").read_text(), *edits)


@pytest.mark.parametrize("script", CASES)
def test_every_script_becomes_one_file_that_starts(script, tmp_path):
    """No two names of the parts clash; the file's --help is the script's."""
    done = subprocess.run([sys.executable, made(script, tmp_path), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--env-id" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "script",
    ["ppo_ddp.py", *(pytest.param(f"{x}_ddp.py", marks=pytest.mark.slow) for x in ("ppg", "dqn", "sac"))],
)
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
    needed = (ROOT / "requirements.txt").read_text().split("\n#")[0].splitlines()
    assert asked == needed and lines[0] == "# /// script"
    rows = dict(line.split()[1:][::-1] for line in lines[end + 2 : lines.index("", end + 2)] if line[-1] != ":")
    assert {"Args", "main", "train", "common/errors.py", "common/run/loop.py"} <= rows.keys()
    for name, number in rows.items():
        line = lines[int(number) - 1]
        assert line == f"# FROM {name}" if "/" in name else line.startswith((f"class {name}", f"def {name}("))
    assert "from common" not in text and "import common" not in text and "# FROM common/onefile.py" not in text
    assert ("class ReplayBuffer" in text) == (script in ("dqn_ddp.py", "sac_ddp.py"))
    assert ("class RunningMoments" in text) == (script in ("ppo_ddp.py", "ppg_ddp.py"))
    assert (ROOT / script).read_text().split("\n\n\n", 1)[1] in text, "the script's own part is not as it stands"
    flags = f"{flags} --shards 2 --save-model"
    alone = finish(start(path, size, f"{flags} --run-dir run", cwd=tmp_path, PYTHONPATH=""), tmp_path / "run")
    assert alone.code == 0, alone.err
    calm = run(script, 1, flags, tmp_path / "calm", dtype="float32")
    assert alone.rows == calm.rows
    one, two = dict(flat(alone.model)), dict(flat(calm.model))
    assert one.keys() == two.keys() and all(x.equal(two[name]) for name, x in one.items())


def test_one_file_speaks_as_the_script_does(tmp_path):
    """--help, and a wrong flag."""
    path = made("ppo_ddp.py", tmp_path)
    helped = finish(start(path, 1, "--help", cwd=tmp_path, PYTHONPATH=""), tmp_path)
    assert helped.code == 0 and "--shards" in helped.out and "--clip-coef" in helped.out
    wrong = finish(start(path, 1, "--num-steps 30", cwd=tmp_path, PYTHONPATH=""), tmp_path)
    assert wrong.code == 2 and "--num-steps 30: must be a multiple of" in wrong.err and not (tmp_path / "runs").exists()


def test_it_overwrites_nothing_and_names_clashes(tmp_path):
    path = made("ppo_ddp.py", tmp_path)
    before = path.read_bytes()
    command = [sys.executable, "-m", "common.onefile", "ppo_ddp.py", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"TARGET {path}: is there already; name a new file." in done.stderr
    assert path.read_bytes() == before
    script = tmp_path / "edited.py"
    script.write_text(changed(("class PPOLoss", "def environment_seeds():\n    pass\n\n\nclass PPOLoss")))
    with pytest.raises(BadInput, match=r"^names clash: environment_seeds is in .*edited\.py and, as another, in "):
        one_file(script, "mine.py")
    for import_, said in REFUSED.items():
        script.write_text(changed(("from common.encoders import Pixels, image_encoder\n", f"{import_}\n")))
        with pytest.raises(BadInput, match=said):
            one_file(script, "mine.py")


ONE_BY_ONE = r"edited\.py, line \d+: import names from common's files one by one"
REFUSED = {
    "from common.distributed import World as c": ONE_BY_ONE,
    "import common.distributed": ONE_BY_ONE,
    "from common import distributed": ONE_BY_ONE,
    "def f():\n    from common.distributed import World": ONE_BY_ONE,
    "from math import *": r"edited\.py, line \d+: import names one by one, from modules by their full names",
    "from common.acting import Pixels": r"Pixels is not made in .*acting\.py; import it from where it is",
    "x = 1\nfrom common.distributed import World": r"edited\.py, line \d+: stands before an import",
}


@pytest.mark.parametrize("place", ["helper.py", "helper/__init__.py", "helper/nets.py"])
def test_a_module_beside_the_script_is_refused(place, tmp_path, monkeypatch):
    """By its name, wherever it is imported; a folder that wandb makes is none, and nothing of common/ is."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("class Swish:\n    pass\n")
    script, module = tmp_path / "edited.py", "helper.nets" if "nets" in place else "helper"
    said = r"edited\.py, line \d+: the module helper stands beside the script, and the new file would still need it\."
    for import_ in (f"from {module} import Swish", f"import {module}", f"def f():\n    import {module} as h"):
        script.write_text(changed(("import numpy as np\n", f"import numpy as np\n{import_}\n")))
        with pytest.raises(BadInput, match=said):
            one_file(script, "mine.py")
    script.write_text(changed(("import numpy as np\n", "import numpy as np\nimport wandb\n")))
    assert "\nimport wandb\n" in one_file(script, "mine.py")
    shutil.copytree(common.onefile.COMMON, tmp_path / "common")
    monkeypatch.setattr(common.onefile, "COMMON", tmp_path / "common")
    with open(tmp_path / "common" / "run" / "loop.py", "a") as file:
        file.write(f"\n\ndef f():\n    import {module}\n")
    with pytest.raises(BadInput, match=said.replace("edited", "loop")):
        one_file(script, "mine.py")


def test_what_a_script_does_when_imported_stays(tmp_path, monkeypatch):
    """Imports for what they do, settings made at the top, a name made in a block, modules of one package.

    And what a file of `common/` does, of which the script takes something else.
    """
    shutil.copytree(common.onefile.COMMON, tmp_path / "common")
    with open(tmp_path / "common" / "run" / "loop.py", "a") as file:
        file.write("\n\nif crossed(2, 1, 2):\n    SETTING = 1\n")
    monkeypatch.setattr(common.onefile, "COMMON", tmp_path / "common")
    added = 'os.environ["A"] = "1"\ntry:\n    import numba\nexcept ImportError:\n    numba = None\n\n\n@dataclass'
    imports = "import my_envs  # noqa: F401\nimport os\nimport torch.nn.functional\nimport torch\n"
    script = tmp_path / "edited.py"
    script.write_text(changed(("\nimport torch\n", f"\n{imports}"), ("\n@dataclass", f"\n{added}")))
    made_of = one_file(script, "mine.py")
    for line in (
        "import my_envs",
        "import torch.nn.functional",
        'os.environ["A"] = "1"',
        "    numba = None",
        "    SETTING = 1",
    ):
        assert made_of.count(f"\n{line}\n") == 1, line
    compile(made_of, "mine.py", "exec")
