"""The picture curves.png of a run."""

import pytest
from helpers import recorded
from matplotlib.figure import Figure
from matplotlib.image import imread

from plumbing.run.curves import plot_curves


def test_what_a_run_has_is_drawn(tmp_path, monkeypatch):
    """A panel for each metric of CURVES, the sampled accuracy first, also of a single value."""
    drawn = recorded(monkeypatch, Figure, "savefig")
    rows = [{"step": s, "objective/scores": s, "eval/greedy_accuracy": 1.0} for s in range(4)]
    plot_curves([*rows, {"step": 4, "eval/accuracy": 0.5, "other": 7}], str(tmp_path / "a.png"))
    (((figure, _), _),) = drawn
    values = [[list(line.get_ydata()) for line in axis.lines] for axis in figure.axes]
    assert values == [[[0.5]], [[1.0] * 4], [[0, 1, 2, 3]]]
    assert figure.axes[0].get_ylim() == (-0.02, 1.02)
    assert imread(tmp_path / "a.png").std() > 0.01


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_curves([{"step": 1, "other": 7}], str(tmp_path / "a.png"))
