"""How a step of grpo.py grows with its sizes: the runs and their picture. `scripts/benchmark.py scaling` calls it."""

import matplotlib
from matplotlib.figure import Figure

COLORS = ("C0", "C1", "C2", "C3")

BASE = {  # flags of grpo.py of all runs; 64 responses of 64 tokens where nothing else is said
    "model": "vocabulary 8192", "rollout_batch_size": 8, "mini_batch_size": 64, "max_response_length": 64,
    "min_response_length": 64, "num_epochs": 2, "learning_rate": 1e-9, "micro_batch_tokens": 2048,
    "total_episodes": 5 * 64,
}  # fmt: skip
VOCABULARIES = 512, 2048, 8192, 32_768
SIZES = 16, 32, 64, 128
AXES = {  # what grows: {its size: flags of grpo.py}
    "responses a step": {
        n: {"rollout_batch_size": n // 8, "mini_batch_size": n, "total_episodes": 5 * n} for n in SIZES
    },
    "tokens a response": {n: {"max_response_length": n, "min_response_length": n} for n in SIZES},
    "responses a prompt, 64 in all": {n: {"group_size": n, "rollout_batch_size": 64 // n} for n in (2, 8, 32, 64)},
    "vocabulary": {n: {"model": f"vocabulary {n}"} for n in VOCABULARIES},
}
PHASES = {"rollout": "time/rollout", "log-probs": "time/logprobs", "two updates": "time/training"}


def draw(found: dict[str, dict[int, dict[str, float]]], path: str) -> None:
    """Draw seconds of the phases of a step, and peak memory, over the sizes of each axis; what is proportional is
    parallel to the dashed line.

    Args:
        found: {axis: {size: {metric: median}}}, "peak" in MiB among the metrics.
        path: of a .png file.
    """
    with matplotlib.rc_context():
        figure = Figure((3.4 * len(found), 5.4), layout="constrained")
        panels = figure.subplots(2, len(found), squeeze=False)
        for column, (axis, rows) in enumerate(found.items()):
            sizes, (time, memory) = sorted(rows), panels[:, column]
            for color, (phase, key) in zip(COLORS, PHASES.items()):
                time.plot(sizes, [rows[n][key] for n in sizes], color=color, marker="o", label=phase)
            memory.plot(sizes, [rows[n]["peak"] for n in sizes], color=COLORS[3], marker="o", label="peak memory")
            line = [max(rows[sizes[-1]][key] for key in PHASES.values()) * n / sizes[-1] for n in sizes]
            time.plot(sizes, line, color="#b9b6b0", linestyle="--", linewidth=1, label="proportional")
            time.set_yscale("log")
            memory.set_ylim(bottom=0)
            for panel in (time, memory):
                panel.set_xscale("log", base=2)
                panel.set_xlabel(axis)
        panels[0, 0].set_ylabel("seconds a step")
        panels[1, 0].set_ylabel("MiB over the model")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
        figure.savefig(path, dpi=110)
