"""Twelve cells off the map `staleness`, committed with their predictions before their runs: lab/results/off_the_map.md.

    python lab/evidence/off_the_map.py runs/stability       # prints the command of each run, five seeds of each cell

Other lags, another size, `discover`, other batches, three other losses. A lag is held at k by (k - 1) B waiting groups.
"""

import sys

from comparisons import SHORT

SETTING = f"{SHORT} --eval_samples 1 --save_every 0"
DISCOVER = "--dataset discover --batch_prompts 8 --max_steps 170"
CELLS = {
    "lag-3": "--k 3 --min_ready 64 --lr 1.6e-3",
    "lag-6": "--k 6 --min_ready 160 --lr 8e-4",
    "lag-12": "--k 12 --min_ready 352 --lr 8.5e-4",
    "lag-32": "--k 32 --min_ready 992 --lr 3.5e-4",
    "size-s": "--task lab.tasks:graded_s --k 6 --min_ready 160 --lr 1.2e-3",
    "discover-12": f"{DISCOVER} --k 12 --min_ready 88 --lr 5.5e-4",
    "discover-3": f"{DISCOVER} --k 3 --min_ready 16 --lr 1.6e-3",
    "batch-16": "--batch_prompts 16 --eval_every 20 --k 12 --min_ready 176 --lr 5.5e-4",
    "batch-64": "--batch_prompts 64 --eval_every 5 --k 3 --min_ready 128 --lr 1.6e-3",
    "dapo": "--loss dapo --k 16 --min_ready 480 --lr 1.15e-3",
    "gspo": "--loss gspo --k 16 --min_ready 480 --lr 8.5e-4",
    "right-above-0.8": "--loss lab.masks:dispo_right_above --k 12 --min_ready 352 --lr 1.5e-3",
}

if __name__ == "__main__":
    for seed in range(5):
        for cell, flags in CELLS.items():
            folder = f"{sys.argv[1]}/stability/{cell}/seed-{seed}"
            print(f"python train.py {SETTING} {flags} --seed {seed} --output_dir {folder} --overwrite true")
