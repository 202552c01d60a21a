"""README and docs: their commands are accepted, the programs are run by other tests, and links lead somewhere."""

import dataclasses
import importlib
import re
import shlex

import pytest
import tyro

from common.arguments import Count, Whole, parse
from runs import ROOT, block_of, run

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
SCRIPTS = ("ppo_ddp.py", "ppg_ddp.py", "dqn_ddp.py", "sac_ddp.py")


def is_ours(word: str) -> bool:
    return word.endswith(".py") or word.startswith("benchmark.")


def commands() -> dict[str, list[str]]:
    """Every command of ours in indented blocks and between backticks, by its text -> its words."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"(?:^ {4,}.*\n)+", text, re.MULTILINE)
        lines = [re.sub(r"\\\n *", "", block).replace("&&", "\n") for block in blocks]
        lines += [" ".join(span.split()) for span in re.findall(r"`((?:python|torchrun) [^`]+)`", text)]
        for line in "\n".join(lines).splitlines():
            if re.match(r" *(\S*python|\S*torchrun|srun torchrun) ", line) and "--help" not in line:
                words = shlex.split(line, comments=True)
                if any(map(is_ours, words)):
                    found[shlex.join(words)] = words
    return found


COMMANDS = commands()


def split(words: list[str]) -> tuple[str, list[str]]:
    """The script or module of a command, and its flags."""
    at = next(i for i, word in enumerate(words) if is_ours(word))
    return words[at], words[at + 1 :]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_docs_is_accepted(command):
    """Its script is there, and its flags and values are valid; small words stand for what a user fills in."""
    name, flags = split([word for word in COMMANDS[command] if word != "&"])
    if name in SCRIPTS:
        args = importlib.import_module(name.removesuffix(".py")).Args
        parse(args, flags)
    elif name.startswith("benchmark."):
        module = importlib.import_module(name)
        flags = ["HEAD" if word == "COMMIT" else word for word in flags]
        tyro.cli(module.Args, args=flags)
    else:
        assert (ROOT / name).exists() and (name != "tools/onefile.py" or (ROOT / flags[0]).exists())


def test_the_docs_have_the_commands_of_every_kind():
    names = {split(words)[0] for words in COMMANDS.values()}
    assert names >= {*SCRIPTS, *(f"benchmark.{x}" for x in ("run", "plot", "compare", "speed")), "tools/onefile.py"}
    assert len(COMMANDS) > 30


def anchors(page) -> set[str]:
    """What links to a page's headings may name."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Files and headings, of README and docs."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_readme_is_short_and_every_page_is_linked():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 90
    pages = [page.read_text() for page in PAGES[2:] if page.name != "results.md"]
    assert len(pages) <= 12 and sum(page.count("\n") for page in pages) <= 1200
    for page in PAGES[1:]:
        assert str(page.relative_to(ROOT)) in readme, page


def test_the_environment_of_the_docs_trains(tmp_path, monkeypatch):
    """The file my_env.py of docs/environments.md, as it stands."""
    (tmp_path / "my_env.py").write_text(block_of("environments.md", 'gym.register("Target-v0"'))
    monkeypatch.syspath_prepend(tmp_path)
    run("ppo_ddp.py", 1, "--env-id my_env:Target-v0 --num-steps 8 --total-timesteps 512", tmp_path / "run")


METADRIVE = """
import gymnasium as gym


class MetaDriveEnv(gym.Env):  # as the real one: one in a process, seeds are scenarios, no `options`
    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Box(-1, 1, (2,))
    alive = []

    def __init__(self, config):
        self.config = config

    def reset(self, seed=None):
        self.alive.append(self)
        assert self.alive.count(self) == len(self.alive)
        first, count = self.config["start_seed"], self.config["num_scenarios"]
        assert first <= seed < first + count
        self.scenario = seed
        return self.observation_space.low + seed / 99, {}

    def step(self, action):
        return self.observation_space.low + self.scenario / 99, float(action.sum()), False, False, {"crash": True}
"""


def test_the_wrapper_of_metadrive_trains_ppg(tmp_path, monkeypatch):
    """In processes of their own, with a stand-in for the package; and every wrapper that the page names is there."""
    (tmp_path / "metadrive.py").write_text(METADRIVE)
    for path in (tmp_path, ROOT / "docs" / "wrappers"):
        monkeypatch.syspath_prepend(path)
    flags = (
        '--env-id my_metadrive:Drive-v0 --vectorization async --env-kwargs {"max_episode_steps":9} --eval-episodes 1'
    )
    flags += " --num-envs 2 --num-steps 8 --n-pi 1 --num-aux-minibatches 2 --num-minibatches 2 --total-timesteps 64"
    done = run("ppg_ddp.py", 1, flags, tmp_path / "run")
    assert len(done.column("eval/episodic_return")) == 2 and sum(done.column("charts/episodes")) > 0
    page = (ROOT / "docs" / "environments.md").read_text()
    modules = {path.stem for path in (ROOT / "docs" / "wrappers").glob("*.py")}
    assert modules == set(re.findall(r"`(my_(?!env)\w+):", page)) and len(modules) >= 5


def test_the_table_of_sizes_has_every_size():
    """docs/moving.md: each flag that counts something or is a period, beside the scripts that have it."""
    page = (ROOT / "docs" / "moving.md").read_text().partition("\n## Sizes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `--(\S+)` \| ([^|]+) \|.*\| (.*) \|$", page, re.MULTILINE)
    told = {name: scripts for name, scripts, _ in rows}
    found = {}
    for script in SCRIPTS:
        for field in dataclasses.fields(importlib.import_module(script.removesuffix(".py")).Args):
            if field.type in (Count, Whole, Count | None):
                name = field.name.replace("_", "-")
                found.setdefault(name, []).append(script.removesuffix("_ddp.py").upper())
    assert told == {name: "all" if len(x) == 4 else ", ".join(x) for name, x in found.items()}
    assert {per for *_, per in rows} == {"a total", "per environment", "per process"}


@pytest.mark.parametrize("script", ["ppo", "dqn", "sac"])
def test_the_defaults_beside_those_of_others_are_ours(script):
    """docs/moving.md: each flag of a table with its default."""
    section = (ROOT / "docs" / "moving.md").read_text().partition(f"\n## {script.upper()}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `--(\S+)` \| (\S+) \|", section, re.MULTILINE)
    args = importlib.import_module(f"{script}_ddp").Args()
    assert len(rows) >= 7
    for name, told in rows:
        value = getattr(args, name.replace("-", "_"))
        words = {True: "on", False: "off", None: "none"} if value is None or isinstance(value, bool) else {}
        assert words.get(value) == told or told.strip("`") == value or float(told) == value, name
