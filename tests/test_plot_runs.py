"""The picture of one's own runs: each curve is what metrics.csv has, under the directory's name."""

from functools import partial
from pathlib import Path

import pytest

import ppg_ddp
from benchmark import compare, plot_runs
from benchmark import run as runner
from common.logger import COLUMNS_OF_ALL

HEADER = "global_step,charts/episodic_return,eval/episodic_return,losses/value_loss,losses/aux/kl_loss,time/wall\n"
ROWS = "0,,9.5,,,0.1\n100,20.0,,0.5,,1.0\n200,,,0.25,,2.0\n200,,30.0,,,2.5\n"


def write(folder: Path, rows: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(HEADER + rows)
    return folder


def panels(**runs: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What is drawn: by panel and label, the points of a curve. The legend names each run."""
    figure = plot_runs.draw({label: compare.load(path) for label, path in runs.items()})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*runs]
    curves = {axis.get_title(): {x.get_label(): x.get_xydata() for x in axis.lines} for axis in figure.axes}
    return {title: {label: [*map(tuple, x)] for label, x in lines.items()} for title, lines in curves.items()}


def test_each_column_is_a_panel_and_each_run_a_curve(tmp_path):
    """Left out are blank cells, a column that is blank in all runs, and a line that is still being written.

    Its last number may be cut: 123456 reads as 12. A run may have a name that matplotlib would hide.
    """
    a, b = write(tmp_path / "a", ROWS + "300,12"), write(tmp_path / "b", "50,1.0,,2.0,,1.0\n")
    assert panels(_a=a, b=b) == {
        "return of training episodes": {"_a": [(100, 20.0)], "b": [(50, 1.0)]},
        "return of evaluations": {"_a": [(0, 9.5), (200, 30.0)], "b": []},
        "losses/value_loss": {"_a": [(100, 0.5), (200, 0.25)], "b": [(50, 2.0)]},
    }
    names = (*COLUMNS_OF_ALL, *ppg_ddp.COLUMNS)
    assert {*HEADER.strip().split(",")} <= {"global_step", *names} and plot_runs.RETURNS.keys() <= {*names}


def test_labels_are_the_directories_names(tmp_path, monkeypatch, capsys):
    """Where two have the same name, their paths; the picture is beside the first run unless --out says otherwise."""
    monkeypatch.chdir(tmp_path)
    paths = [write(Path(name), ROWS) for name in ("one/a", "one/b", "two/a")]
    plot_runs.main(plot_runs.Args((paths[0], paths[1])))
    assert capsys.readouterr().out == "drew a, b in one/a/curves.png\n"
    assert Path("one/a/curves.png").read_bytes().startswith(b"\x89PNG")
    plot_runs.main(plot_runs.Args((paths[0], paths[2]), Path("both.svg")))
    assert capsys.readouterr().out == "drew one/a, two/a in both.svg\n" and "<svg" in Path("both.svg").read_text()


def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)  # those of the tests stay
    (tmp_path / "empty").mkdir()
    good = write(tmp_path / "a", ROWS)
    cases = {
        "nowhere: is no run directory": ((tmp_path / "nowhere",), None),
        "empty: is no run directory": ((good, tmp_path / "empty"), None),
        "metrics.csv: holds no whole row": ((write(tmp_path / "header", ""),), None),
        "no row has a return or a loss yet": ((write(tmp_path / "blank", "8,,,,,1.0\n"),), None),
        "name at least one": ((), None),
        "--out nowhere/x.png: cannot be written": ((good,), Path("nowhere/x.png")),
    }
    for said, (runs, out) in cases.items():
        with pytest.raises(SystemExit) as ended:
            runner.or_say_why(partial(plot_runs.main, plot_runs.Args(runs, out)))
        told = capsys.readouterr().err
        assert ended.value.code == 2 and said in told and told.startswith("error: ") and told.count("\n") == 1
