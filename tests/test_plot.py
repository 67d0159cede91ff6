"""scripts/plot.py."""

import plot
import pytest
from helpers import write_rows
from matplotlib.figure import Figure
from matplotlib.image import imread


@pytest.fixture
def runs(tmp_path) -> tuple[str, ...]:
    """Two runs of one name."""
    folders = [tmp_path / "monday" / "run", tmp_path / "tuesday" / "run"]
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        write_rows(folder / "metrics.jsonl", [{"step": s, "objective/scores": (i + s) / 9} for s in range(4)])
    return tuple(map(str, folders))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_two_runs_of_one_name(runs, tmp_path, monkeypatch, ending):
    """Both are drawn, under names that tell them apart."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    plot.main(runs, str(tmp_path / f"a.{ending}"), ("objective/scores",))
    (axis,) = drawn[0].axes
    assert [line.get_label() for line in axis.get_lines()] == ["monday/run", "tuesday/run"]
    assert [list(line.get_ydata()) for line in axis.get_lines()] == [[(i + s) / 9 for s in range(4)] for i in (0, 1)]
    if ending == "png":
        assert imread(tmp_path / "a.png").std() > 0.01


@pytest.mark.parametrize("output", ["no/such/folder/a.png", "a.xyz"])
def test_what_cannot_be_drawn(runs, tmp_path, capsys, output):
    for words in ((runs, output), ((str(tmp_path),), "a.png"), ((), "a.png")):
        with pytest.raises(SystemExit) as end:
            plot.main(*words)
        assert end.value.code == 2 and capsys.readouterr().err.startswith(f"error: --output {words[1]}: ")
