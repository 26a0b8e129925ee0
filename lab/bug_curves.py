"""What bugs of docs/find_the_bug.md do to a run of recipe.py with seed 0, beside one without a bug: pictures/bugs.png.

python lab/bug_curves.py            # the picture, from pictures/bugs.csv
python lab/bug_curves.py 0 2 12     # first runs recipe.py without a bug and with bugs 2 and 12
"""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from lab.exercises import read_page

CURVES = ROOT / "docs" / "pictures" / "bugs.csv"


def run(bug: str) -> list[list[str]]:
    """Rows of the curves: bug, step, sampled tokens, share of right answers to the held-out problems."""
    with TemporaryDirectory() as folder:
        if bug != "0":
            exercise = read_page()[bug]
            Path(folder, exercise.file.name).write_text(exercise.text)
        # -P: recipe.py imports the copy with the bug, and the files beside it only where there is no copy.
        command = [sys.executable, "-P", "-c", "import recipe; recipe.train()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        output = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True).stdout
    print(f"bug {bug}\n{output}", flush=True)
    lines = re.findall(r"^step +(\d+) +([\d,]+) tokens +right (\S+)", output, re.M)
    return [[bug, step, tokens.replace(",", ""), right] for step, tokens, right in lines]


def draw(rows: list[list[str]]) -> None:
    """A panel for each bug, with the curve of the run without one."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for bug, step, _, right in rows:
        curves.setdefault(bug, []).append((int(step), float(right)))
    figure = Figure(figsize=(8, 3.8), dpi=100)
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flat
    for bug in sorted(curves.keys() - {"0"}, key=int):
        panel = next(panels)
        panel.plot(*zip(*curves["0"], strict=True), "0.6", label="without a bug")
        panel.plot(*zip(*curves[bug], strict=True), "C1", label="with it")
        panel.set(title=f"bug {bug}", ylim=(0, 1), xticks=[0, 16, 32, 48, 64])
    for panel in panels:
        panel.set_axis_off()
        panel.legend(*figure.axes[0].get_legend_handles_labels(), loc="center", fontsize=10)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("right", fontsize=10)
    figure.savefig(CURVES.with_suffix(".png"))


if __name__ == "__main__":
    if set(sys.argv[1:]) - {"0", *read_page()}:
        sys.exit(__doc__)
    with CURVES.open() as file:
        header, *rows = csv.reader(file)
    for bug in sys.argv[1:]:
        rows = [row for row in rows if row[0] != bug] + run(bug)
        with CURVES.open("w") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *sorted(rows, key=lambda row: int(row[0]))])
    draw(rows)
