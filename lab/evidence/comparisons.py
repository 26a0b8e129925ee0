"""What is compared, as tables: runs of `train.py`, and what others state.

A variant is a name and the flags that differ from the comparison's setting. The first variant is the baseline. Add a
row, and the next call of ablate.py runs what is new. Most published runs were made at commit 3f7434d, and curves.csv.gz
has the flags of that day: they also had --max_ready, which kept the lag of the default schedule at 1 to 2, and `--mask
X`, `--loss dispo`, `--dataset rare` and `--dataset ramble` for what is `--loss lab.masks:X`, `--loss lab.masks:dispo`
and `--task lab.tasks:...` here. It also has runs of comparisons that are gone; 17e9d0b has them.
"""

import math
from dataclasses import dataclass, field

# The graded task, whose ceiling of .80 is known by construction, run to about eleven C_mid (.17M tokens each), with 30
# evaluations of 512 problems twice each. It was chosen on seeds 101 to 106, which are never used for results.
GRADED = (
    "--dataset graded --batch_prompts 32 --max_num_seqs 512 --min_budget 14 --max_budget 18 --lr 7e-4 --k 8 "
    "--max_steps 4000 --max_sampled_tokens 2000000 --eval_every 10 --held_out 512 --eval_samples 2 "
    "--save_every 120 --engine torch"
)
SHORT = GRADED.replace("2000000", "1200000")
VLLM = SHORT.replace("torch", "vllm")  # where time is compared; a run takes twice as long

# A model that seldom thinks, in runs of a quarter of a minute. Chosen in single runs of seed 1, which is not among the
# published ones.
DISCOVER = (
    "--dataset discover --engine torch --batch_prompts 8 --max_num_seqs 128 --lr 3.5e-4 --max_steps 800 "
    "--max_sampled_tokens 50000 --eval_every 8 --save_every 0"
)


@dataclass(frozen=True)
class Comparison:
    """One question.

    variants  name -> flags in addition to those of `setting`
    against   variant -> its baseline, where that is not the first variant
    axis      compute that runs are fitted against
    """

    about: str
    variants: dict[str, str]
    setting: str = GRADED
    against: dict[str, str] = field(default_factory=dict)
    axis: str = "tokens"


# A lag that is held: (k - 1) B groups wait behind each batch, so every token is about k versions old, and as many
# groups are under way for every k. Without it the queue sets the lag, and k hardly matters.
HELD = {k: f"--k {k} --min_ready {(k - 1) * 32}" for k in (1, 2, 4, 8, 16)}
HARD_LAG = f"{SHORT} {HELD[8]}"


CAPS = {"cispo-8": "--eps_max 8"} | {f"dapo-0.{c}": f"--loss dapo --eps_high 0.{c}" for c in (20, 28)}
OTHERS = {"gspo": "--loss gspo", "grpo": "--loss grpo", "tis": "--loss tis"}
STALE_MASKS = ("icepop", "sequence", "geometric", "deepseek", "dppo", "dppo_kl", "m2po")

RECIPES = {  # batches are 5/3 as large where zero-variance groups leave them: there 1280 for 768
    "scalerl": "",
    "deepseek-grpo": "--loss grpo --aggregation sample --normalize_advantages prompt --schedule ppo_off_policy "
    "--zero_variance keep --pass_rate_threshold 1.1",
    "qwen2.5-dapo": "--loss dapo --normalize_advantages prompt --schedule ppo_off_policy --batch_prompts 53 "
    "--pass_rate_threshold 1.1",
    "magistral": "--loss dapo --normalize_advantages prompt --batch_prompts 53 --pass_rate_threshold 1.1",
    "minimax-m1": "--normalize_advantages prompt --schedule ppo_off_policy --batch_prompts 53 "
    "--pass_rate_threshold 1.1",
}

COMPARISONS = {
    "law": Comparison(  # of the baseline more seeds: `ablate.py law --seeds 12 --only baseline`
        "half a run predicts the other: the baseline, and variants that should not move the known ceiling",
        {
            "baseline": "",
            "sample-average": "--aggregation sample",
            "prompt-normalization": "--normalize_advantages prompt",
            "dapo-0.26": "--loss dapo",
        },
    ),
    "losses": Comparison(  # GSPO's lower clip is 3/4 of its upper one, as in its paper and in ScaleRL's run
        "the loss, and how much its clip matters (Figure 5)",
        {
            "cispo-5": "",
            "cispo-4": "--eps_max 4",
            "cispo-8": "--eps_max 8",
            "dapo-0.26": "--loss dapo",
            "dapo-0.27": "--loss dapo --eps_high 0.27",
            "gspo-4e-3": "--loss gspo",
            "gspo-4e-3-sample": "--loss gspo --aggregation sample",
            "gspo-4e-4": "--loss gspo --eps_low 3e-4 --eps_high 4e-4",
            "gspo-1e-4": "--loss gspo --eps_low 7.5e-5 --eps_high 1e-4",
        },
        against={"dapo-0.27": "dapo-0.26"},
    ),
    "schedules": Comparison(
        "generator and trainer one after the other or side by side, and the lag (Figure 4)",
        {
            "pipeline-8": "",
            "lag-1": "--k 1",
            "lag-2": HELD[2],
            "lag-4": HELD[4],
            "lag-8": HELD[8],
            "lag-8-half-rate": f"--lr 3.5e-4 {HELD[8]}",
            "ppo-off-policy-8": "--schedule ppo_off_policy",
            "ppo-off-policy-1": "--schedule ppo_off_policy --k 1",
        },
        against={"lag-4": "lag-8", "lag-8-half-rate": "lag-8"},
        setting=VLLM,
        axis="device_hours",
    ),
    "normalization": Comparison(
        "what divides the advantages",
        {"batch": "", "prompt": "--normalize_advantages prompt", "none": "--normalize_advantages none"},
    ),
    "recipes": Comparison(
        "prevalent recipes as the paper ran them again (Figure 2)",
        RECIPES,
    ),
    # A problem of 2, 3 or 4 operations needs 6, 9 or 12 tokens of thinking; the paper's longer context is slower at
    # first and higher in the end (Table 1).
    "context": Comparison(
        "a thinking budget that the longest problems need, and two that are shorter (the paper: 32k and 14k tokens)",
        {"14-18": "", "9-11": "--min_budget 9 --max_budget 11", "6-8": "--min_budget 6 --max_budget 8"},
    ),
    "batch": Comparison(  # there 512, 768 and 2048 completions
        "prompts per optimizer step, at equal tokens",
        {
            "batch-32": "",
            "batch-16": "--batch_prompts 16 --eval_every 20",
            "batch-64": "--batch_prompts 64 --eval_every 5",
        },
    ),
    "rollouts": Comparison(
        "completions per prompt, at equal completions per step",
        {
            "rollouts-16": "",
            "rollouts-8": "--rollouts 8 --batch_prompts 64",
            "rollouts-32": "--rollouts 32 --batch_prompts 16",
        },
    ),
    # Committed before their runs: seeds 0 to 6, and none is left out. Tested, paired by seed: FLOPs and sampled tokens
    # to .5 (a line between evaluations), corrected for two tests by Holm's method.
    "dynamic-sampling": Comparison(
        "groups with equal rewards: dropped, or replaced by others (DAPO's dynamic sampling)",
        {"dropped": "", "replaced": "--zero_variance replace"},
        setting=DISCOVER,
    ),
    # Committed before their runs: seeds 0 to 6, and none is left out. A quarter of the batch, with three rules for the
    # rate; fresh tokens, since a lag in updates is another one in tokens. A rule fits if sampled tokens to .5 are those
    # of batch 32: its ratio's 95 % interval, paired by seed, holds 1 and lies within .8 to 1.25.
    "batch-rule": Comparison(
        "a smaller batch, and a rate that stays, goes as the batch's square root (arXiv 2205.10287), or as the batch",
        {
            "batch-32": "",
            "batch-8-same-rate": "--batch_prompts 8 --eval_every 40",
            "batch-8-root": "--batch_prompts 8 --eval_every 40 --lr 3.5e-4",
            "batch-8-linear": "--batch_prompts 8 --eval_every 40 --lr 1.75e-4",
        },
        setting=f"{SHORT.replace('1200000', '360000')} --k 1 --save_every 0",
    ),
    # Committed before their runs: seeds 0 to 2, and none is left out. Compute until the pass rate is .4, half of what
    # can be solved (a line between evaluations), goes as depth^gamma: gamma is the slope of a line in logs over the 15
    # runs, with its 95 % interval by t; in sampled tokens, in completions and in FLOPs. Beside it an exponential in
    # depth, by its squared errors. A run ends after two evaluations of .5 or more; one that does not reach .4 is named,
    # and gamma is then a lower bound.
    "depth": Comparison(
        "compute to learn chains of 2 to 6 operations, each trained alone (arXiv 2605.06638)",
        {f"depth-{ops}": f"--task lab.tasks:depth_{ops}" for ops in range(2, 7)},
        setting=f"{SHORT} --min_budget 20 --max_budget 26 --eval_every 4 --held_out 256 --save_every 0",
    ),
    # The next three were committed with their settings before their runs: lab/results/staleness.md has what came out,
    # and none is left out.
    # `staleness` had three seeds in all cells but one. Committed before the others were run, at the tag, too: seeds 3
    # to 6 of the highest rate at which all three stand, for each lag: 1.4e-3 at 1, 7e-4 at 2, 4, 3.5e-4 at 8, 16.
    # Where one of the seven falls, the next lower rate of that lag gets four more seeds, too.
    "staleness": Comparison(
        "a map: at which lag and learning rate runs rise, rise slowly, or fall (arXiv 2607.01083)",
        {
            f"lag-{k}-lr-{lr}": f"{HELD[k]} --lr {lr}"
            for k in (1, 2, 4, 8, 16)
            for lr in ("3.5e-4", "7e-4", "1.4e-3", "2.8e-3")
        },
        setting=SHORT,
    ),
    "survivors": Comparison(
        "a lag of 8 at a rate where the recipe falls: which losses and masks of stale tokens (lab/masks.py) survive",
        {"cispo-5": ""}
        | CAPS
        | {"dispo": "--loss lab.masks:dispo"}
        | OTHERS
        | {mask: f"--loss lab.masks:{mask}" for mask in STALE_MASKS},
        setting=f"{HARD_LAG} --lr 1e-3",
    ),
    # Which of DISPO's bounds keeps a run standing? Committed before its runs, with the rules of `survivors`: seven
    # seeds, and none is left out; CISPO as it is are the seven runs of `survivors`. A bound is said to keep runs
    # standing if at least six of seven stand, and said not to if at most one does; between these it is `in part`.
    # `dispo-paper`: arXiv 2602.00983, by a summary.
    "bounds": Comparison(
        "a lag of 8 at a rate where CISPO falls: a floor or a cap for right answers, and the bounds of DISPO's paper",
        {
            "cispo-5": "",
            "right-above-0.8": "--loss lab.masks:dispo_right_above",
            "right-below-1.28": "--loss lab.masks:dispo_right_below",
            "dispo-paper": "--loss lab.masks:dispo_paper",
        },
        setting=f"{HARD_LAG} --lr 1e-3",
    ),
    "recipes-stressed": Comparison(  # the others sample in turns, with eight updates a round, as in the paper
        "the same recipes at a rate of 1e-3, and those with PipelineRL at a lag that is held at 8",
        RECIPES | {"scalerl": HELD[8], "magistral": f"{RECIPES['magistral']} --min_ready {7 * 53}"},
        setting=f"{SHORT} --lr 1e-3",
    ),
}


@dataclass(frozen=True)
class Statement:
    """What somebody states of variant minus baseline, which our runs could have shown to be otherwise.

    measure  "A", "B", "end" and "elsewhere" (pass rates), compute to .5 ("tokens", "flops"), or "stands": how many
             runs neither fall nor never rise
    between  the statement: the difference (of logarithms for compute) lies between these two; None where nobody states
             one. What is "equal" in A is so within the paper's margin of .02 between equal runs.
    """

    comparison: str
    variant: str
    against: str
    measure: str
    words: str
    between: tuple[float, float] | None = None


EQUAL, LOWER, LESS = (-0.02, 0.02), (-math.inf, -0.02), (-math.inf, 0.0)
NEAR = (math.log(0.8), math.log(1.25))
STATEMENTS = [
    Statement("losses", "cispo-4", "cispo-5", "A", "equal: caps of 4, 5 and 8", EQUAL),
    Statement("losses", "gspo-4e-3", "cispo-5", "A", "equal: Figure 5", EQUAL),
    Statement("normalization", "none", "batch", "A", "equal: section 3.2", EQUAL),
    Statement("context", "9-11", "14-18", "A", "lower by .035: Table 1", LOWER),
    Statement("batch", "batch-16", "batch-32", "A", "equal: Table 1", EQUAL),
    Statement("rollouts", "rollouts-32", "rollouts-16", "A", "equal: Table 1", EQUAL),
    Statement("schedules", "ppo-off-policy-8", "pipeline-8", "B", "lower by 1.87: Figure 4", LESS),
    Statement("schedules", "ppo-off-policy-1", "pipeline-8", "B", "lower by 2.40: Figure 4", LESS),
    Statement("downstream", "batch-16", "batch-64", "elsewhere", "–"),
    Statement("batch-rule", "batch-8-root", "batch-32", "tokens", "equal: Malladi et al.", NEAR),
    Statement("reuse", "tau-5", "tau-1", "end", "equal: Tan et al.", EQUAL),
    Statement("reuse", "tau-100", "tau-1", "end", "lower: Tan et al.", LOWER),
    Statement("sizes", "xl", "xs", "flops", "lower: Tan et al.", LESS),
    # GRPO's own clip is there under two names.
    Statement("survivors", "grpo dapo-0.20", "cispo-5", "stands", "–"),
    Statement("survivors", "gspo", "cispo-5", "stands", "–"),
    Statement("survivors", "dispo", "cispo-5", "stands", "–"),
    Statement("survivors", "icepop", "cispo-5", "stands", "–"),
]
