"""scripts/plot.py."""

import plot
import pytest
import tyro
from helpers import refused, table, write_rows
from matplotlib.figure import Figure
from matplotlib.image import imread

WRONG = table("command_lines.json")["pictures"]


@pytest.fixture
def runs(tmp_path) -> tuple[str, ...]:
    """Two runs of one name."""
    folders = [tmp_path / "monday" / "run", tmp_path / "tuesday" / "run"]
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        rows = [
            {"step": s, "objective/scores": i + s, "eval/greedy_accuracy": 1.0} for s in range(4)
        ]
        write_rows(folder / "metrics.jsonl", [*rows, {"step": 4, "eval/accuracy": i / 2}])
    return tuple(map(str, folders))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_two_runs_of_one_name(runs, tmp_path, monkeypatch, ending):
    """Both are drawn in each panel, under names that tell them apart; the sampled accuracy first."""
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k)
    )
    plot.main(runs, str(tmp_path / f"a.{ending}"))
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "monday/run",
        "tuesday/run",
    ]
    values = [[list(line.get_ydata()) for line in axis.lines] for axis in drawn[0].axes]
    assert values == [[[0.0], [0.5]], [[1.0] * 4] * 2, [[0, 1, 2, 3], [1, 2, 3, 4]]]
    assert drawn[0].axes[0].get_ylim() == (-0.02, 1.02)
    if ending == "png":
        assert imread(tmp_path / "a.png").std() > 0.01


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_drawn(runs, tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, tyro.cli, plot.main, args=line.split()).startswith(
        f"error: {WRONG[line]}"
    )
