"""What `evidence/ablate.py` compares: one table of `train.py` flags. Add a row, and the next call runs what is new.

A row is a name and the flags that differ from the comparison's setting; the first row is what the others are compared
with. Equal flags are one run, wherever they occur, in the folder of the first comparison that has them.
"""

import math
from dataclasses import dataclass, field

from masks import MASKS

# The setting of the final sweeps: the graded task, whose ceiling of .80 is known by construction, run to about
# eleven C_mid (.17M tokens each), with 30 evaluations of 512 problems twice each. It was chosen on seeds 101 to 106,
# which are never used for results. --max_ready keeps the lag at 1 to 2 unless a row changes it.
GRADED = (
    "--dataset graded --batch_prompts 32 --max_num_seqs 512 --min_budget 14 --max_budget 18 --lr 7e-4 --k 8 "
    "--max_ready 32 --max_steps 4000 --max_sampled_tokens 2000000 --eval_every 10 --eval_problems 512 --eval_samples 2 "
    "--probe_every 6 --save_every 120 --engine torch"
)
# The task where the law fails: a thinking budget that is too short for its longest chains, and a calm learning rate.
CHAIN = GRADED.replace("graded", "chain").replace("--min_budget 14 --max_budget 18", "--min_budget 18 --max_budget 22")
CHAIN = CHAIN.replace("7e-4", "3e-4").replace("2000000", "3000000")
# Where time or bfloat16 is compared: real vLLM, which takes twice as long, and so to seven C_mid.
VLLM = GRADED.replace("torch", "vllm").replace("2000000", "1200000")
# `make real` on a processor that multiplies bfloat16.
PRETRAINED = (
    "--model runs/real-start/model --dtype bfloat16 --answer_budget 8 --length_control penalty --lr 1e-5 "
    "--held_out 256 --tokens_per_microbatch 1024 --share_prompts true --max_num_seqs 256"
)
SUMS = "--batch_prompts 16 --max_budget 8 --penalty_window 8 --loss dispo --k 2 --eval_every 4 --save_every 14"
# The easy half of the graded task as a data set (evidence/halves.py), whose C_mid is half of GRADED's.
HALVES = GRADED.replace(
    "--dataset graded",
    "--model runs/halves/model --dataset runs/halves/easy.jsonl:exact --held_out 512 --reward_workers 1 "
    '--interruption_phrase "time up </think>"',
).replace("2000000", "1200000")
HARD = "runs/halves/hard.jsonl:exact"
SAMPLES = 65_536  # completions of each run of the grids; the learning rate goes with the square root of the batch


MARGIN = 0.02  # in A, which the paper calls the noise between equal runs (arXiv 2510.13786, section 3)


def near(A: float) -> tuple[str, float, float]:
    """The paper's difference in the ceiling, variant minus baseline, give or take its margin."""
    return "A", A - MARGIN, A + MARGIN


EQUAL, LOWER, HIGHER = near(0.0), ("A", -math.inf, 0.0), ("A", 0.0, math.inf)
EQUAL_END, LOWER_END, HIGHER_END = (("end", *ends) for _, *ends in (EQUAL, LOWER, HIGHER))  # pass rate at the end


@dataclass(frozen=True)
class Comparison:
    """One question. `variants`: name -> flags in addition to those of `setting`; the first is the baseline of the
    others, but for those that `against` gives another. `paper`: variant -> (measure, low, high): between these lies the
    paper's difference to that baseline. `published`: variant -> the paper's (A, B). `sets`: data sets evaluated
    apart, as curves.py orders them. `axis`: compute that runs are fitted against. `pass_rate`: the compute to it is
    reported. `minutes`: of a run on two idle cores, half of the time that two at once take."""

    about: str
    variants: dict[str, str]
    setting: str = GRADED
    against: dict[str, str] = field(default_factory=dict)
    paper: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    published: dict[str, tuple[float, float]] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    axis: str = "tokens"
    pass_rate: float = 0.5
    minutes: float = 1.4


# A lag that is held: (k - 1) B groups wait behind each batch, so every token is about k versions old, and as many
# groups are under way for every k. Without it the queue sets the lag, and k hardly matters.
HELD = {k: f"--k {k} --max_ready 0 --min_ready {(k - 1) * 32}" for k in (1, 2, 4, 8, 16)}


RECIPES = {  # batches 5/3 as large where zero-variance groups leave them: there 1280 for 768
    "scalerl": "",
    "deepseek-grpo": "--loss grpo --aggregation sample --normalize_advantages prompt --schedule ppo_off_policy "
    "--k 8 --max_ready 0 --zero_variance_filter false --pass_rate_threshold 1.1",
    "qwen2.5-dapo": "--loss dapo --normalize_advantages prompt --schedule ppo_off_policy --k 8 "
    "--max_ready 0 --batch_prompts 53 --pass_rate_threshold 1.1",
    "magistral": "--loss dapo --normalize_advantages prompt --batch_prompts 53 --max_ready 53 "
    "--pass_rate_threshold 1.1",
    "minimax-m1": "--normalize_advantages prompt --schedule ppo_off_policy --k 8 --batch_prompts 53 "
    "--max_ready 0 --pass_rate_threshold 1.1",
}


def grid(difficulty: str) -> Comparison:
    """For `python isocompute.py OUTPUT/grid-easy/*/seed-*`. On-policy, or the lag would go with the batch."""
    shapes = [(B_p, n) for B_p in (16, 64) for n in (4, 8, 16, 32, 64)]
    return Comparison(
        f"cheap runs over prompts per batch and rollouts per prompt, the {difficulty} half (arXiv 2603.12151)",
        {
            f"{B_p}x{n}": f"--batch_prompts {B_p} --rollouts {n} --max_num_seqs {min(512, B_p * n)} "
            f"--max_steps {SAMPLES // (B_p * n)} --eval_every {SAMPLES // (B_p * n) // 16}"
            for B_p, n in shapes
        },
        setting=f"{GRADED} --difficulty {difficulty} --k 0 --max_ready 0 --lr 1e-3 --lr_scale sqrt "
        "--max_sampled_tokens 0 --pass_rate_threshold 1.1 --eval_problems 256 --eval_samples 4",
        pass_rate=0.2,
        minutes=0.8,
    )


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
    # Added, and committed with its bar, before its runs. At temperature 1 a policy stays below what it has learned, so
    # only 26 of the law's 32 fits hold the .80 at the end. If that is why, nine in ten do where evaluations take the
    # likeliest token; training is the same. Eight seeds, which are in no other table.
    "law-greedy": Comparison(
        "the law's runs, evaluated with the likeliest token: does the fit find the known ceiling?",
        {
            "baseline": "--eval_temperature 0",
            "sample-average": "--aggregation sample --eval_temperature 0",
            "prompt-normalization": "--normalize_advantages prompt --eval_temperature 0",
            "dapo-0.26": "--loss dapo --eval_temperature 0",
        },
    ),
    "chain": Comparison(
        "the task where half a run does not predict the other: all short chains are learned at once, long ones never",
        {"chain": ""},
        setting=CHAIN,
        minutes=2.1,
    ),
    # Committed before its runs, three seeds: the forecast from half holds if two of three ends lie in their bands. On
    # sums and products a run stands if it ends within .05 of its best evaluation; 56 steps are four C_mid of the one
    # run of sums before. Products have a spectrum: of one digit each the model knows .61, of one or two .30.
    "pretrained": Comparison(
        "a pretrained model of 135M parameters on tasks that nobody made for the law (tools/real_model.py)",
        {
            "functions": "--dataset runs/real-start/functions.jsonl:code --unsafe_code true --batch_prompts 8 "
            "--max_budget 20 --penalty_window 20 --max_steps 24 --eval_every 2",
            "sums": f"--dataset runs/real-start/sums.jsonl {SUMS} --max_steps 56",
            "products": f"--dataset runs/real-start/products.jsonl {SUMS} --batch_prompts 8 --max_steps 65 "
            "--eval_every 5",
        },
        setting=PRETRAINED,
        minutes=18,
    ),
    "unstable": Comparison(
        "what makes runs fall, and what the logs say before they do",
        {
            "baseline": "",
            "lr-2e-3": "--lr 2e-3",
            "lr-3e-3": "--lr 3e-3",
            "lr-1e-3-lag-8": f"--lr 1e-3 {HELD[8]}",
            "lr-2e-3-lag-8": f"--lr 2e-3 {HELD[8]}",
            "lr-4e-3-lag-8": f"--lr 4e-3 {HELD[8]}",
        },
    ),
    "leave-one-out": Comparison(
        "the recipe without one ingredient each (Figure 7)",
        {
            "scalerl": "",
            "prompt-normalization": "--normalize_advantages prompt",
            "length-penalty": "--length_control penalty",
            "lag-2": HELD[2],  # without the filter a step takes longer, so that more is sampled meanwhile: lag is held
            "lag-2-no-zero-variance-filter": f"{HELD[2]} --zero_variance_filter false",
            "ppo-off-policy-8": "--schedule ppo_off_policy --k 8 --max_ready 0",
            "sample-average": "--aggregation sample",
            "dapo-loss": "--loss dapo",
            "uniform-sampling": "--pass_rate_threshold 1.1",
        },
        against={"lag-2-no-zero-variance-filter": "lag-2"},
        paper={
            "prompt-normalization": EQUAL, "length-penalty": EQUAL, "lag-2-no-zero-variance-filter": LOWER,
            "ppo-off-policy-8": EQUAL, "sample-average": EQUAL, "dapo-loss": EQUAL, "uniform-sampling": LOWER,
        },
    ),
    # A head in bfloat16 rounds twice as much off as with the 47 words (benchmark.py head). Half of VLLM's tokens, 5
    # C_mid: with the large head a token costs five times as much, and a warm start takes twelve minutes.
    "fp32-head": Comparison(
        "the FP32 head, where it can matter: bfloat16 and a large vocabulary (section 3.2)",
        {"fp32-head": "", "bfloat16-head": "--fp32_head false"},
        paper={"bfloat16-head": near(-0.09)},
        setting=VLLM.replace("1200000", "600000") + " --dtype bfloat16 --vocabulary 32768",
        minutes=15,
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
        paper={
            "cispo-4": EQUAL, "cispo-8": EQUAL, "dapo-0.26": near(-0.075), "dapo-0.27": near(-0.05),
            "gspo-4e-3": near(-0.005),
        },
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
            "ppo-off-policy-8": "--schedule ppo_off_policy --k 8 --max_ready 0",
            "ppo-off-policy-1": "--schedule ppo_off_policy --k 1 --max_ready 0",
        },
        against={"lag-4": "lag-8", "lag-8-half-rate": "lag-8"},
        paper={
            "lag-4": EQUAL, "ppo-off-policy-8": ("B", 2.68 - 4.55, 2.68 - 4.55),
            "ppo-off-policy-1": ("B", 2.15 - 4.55, 2.15 - 4.55),
        },
        setting=VLLM,
        axis="device_hours",
        minutes=2.7,
    ),
    # Committed with its settings before its runs: five lags by four learning rates. In figures.py `fall_of` says which
    # runs *fall* and `learns` which *never rise*; all others *stand*, and none is left out. Does the highest rate at
    # which all seeds stand go as 1 / lag?
    "staleness": Comparison(
        "a map: at which lag and learning rate runs rise, rise slowly, or fall (arXiv 2607.01083)",
        {
            f"lag-{k}-lr-{lr}": f"{HELD[k]} --lr {lr}"
            for k in (1, 2, 4, 8, 16)
            for lr in ("3.5e-4", "7e-4", "1.4e-3", "2.8e-3")
        },
        setting=GRADED.replace("2000000", "1200000"),
    ),
    # Committed before its runs. Its groups.jsonl say how many retired prompts are still solved, and after how long.
    "review": Comparison(
        "does it cost to retire solved prompts for good, or do they have to come again?",
        {"retired": "", "review-0.2": "--review 0.2"},
    ),
    # Committed with its settings before its runs. At this lag and rate three of seven runs of `schedules` fell, so it
    # can show more falls and fewer. What counts is as in `staleness`; seven seeds, and none is left out.
    "stress": Comparison(
        "a lag of 8 at a rate where some runs fall: the recipe without one ingredient each, and the other losses",
        {
            "scalerl": "",
            "prompt-normalization": "--normalize_advantages prompt",
            "sample-average": "--aggregation sample",
            "no-zero-variance-filter": "--zero_variance_filter false",
            "uniform-sampling": "--pass_rate_threshold 1.1",
            "length-penalty": "--length_control penalty",
            "cispo-8": "--eps_max 8",
            "dapo-0.20": "--loss dapo --eps_high 0.2",
            "dapo-0.28": "--loss dapo --eps_high 0.28",
            "gspo": "--loss gspo",
            "grpo": "--loss grpo",
            "tis": "--loss tis",
        },
        setting=f"{GRADED.replace('2000000', '1200000')} {HELD[8]}",
    ),
    # Committed before its runs, with the rules of `staleness`. At 7e-4 nearly all runs of `stress` stand, which shows
    # what does harm and not what helps; at this rate all three of `unstable` fell. Seven seeds, and none is left out.
    "survivors": Comparison(
        "a lag of 8 at a rate where the recipe falls: which losses and which masks of stale tokens (masks.py) survive",
        {
            "cispo-5": "",
            "cispo-8": "--eps_max 8",
            "dapo-0.20": "--loss dapo --eps_high 0.2",
            "dapo-0.28": "--loss dapo --eps_high 0.28",
            "dispo": "--loss dispo",
            "gspo": "--loss gspo",
            "grpo": "--loss grpo",
            "tis": "--loss tis",
        }
        | {mask: f"--mask {mask}" for mask in MASKS if mask != "truncate"},
        setting=f"{GRADED.replace('2000000', '1200000')} {HELD[8]} --lr 1e-3",
    ),
    # Committed before its runs, with the rules of `staleness`, at the rate and lag of `stress`, where the recipe stands
    # in float32: does a coarser type bring runs down, and does the head save them? Three seeds, later seven of the
    # first two; real vLLM.
    "precision": Comparison(
        "a lag of 8 in 16 bits: bfloat16 with and without the FP32 head, float16 with a scaled loss, float32",
        {
            "bfloat16": "--dtype bfloat16",
            "bfloat16-head": "--dtype bfloat16 --fp32_head false",
            "one-sided-head": "--dtype bfloat16 --one_sided_head true",
            "float16": "--dtype float16",
            "float32": "",
        },
        setting=f"{VLLM} {HELD[8]}",
        minutes=2.7,
    ),
    "aggregation": Comparison(
        "the average of the token losses",
        {"prompt": "", "sample": "--aggregation sample", "token": "--aggregation token",
         "constant": "--aggregation constant"},
        paper={"sample": LOWER, "token": LOWER},
    ),
    "normalization": Comparison(
        "what divides the advantages",
        {"batch": "", "prompt": "--normalize_advantages prompt", "none": "--normalize_advantages none"},
        paper={"prompt": EQUAL, "none": EQUAL},
    ),
    "recipes": Comparison(
        "prevalent recipes as the paper ran them again (Figure 2); the head is FP32 in all, as in float32 it must be",
        RECIPES,
        paper={
            "deepseek-grpo": near(-0.12), "qwen2.5-dapo": near(-0.095), "magistral": near(-0.075), "minimax-m1": EQUAL,
        },
        published={  # Figure 2
            "scalerl": (0.610, 1.97), "deepseek-grpo": (0.490, 1.17), "qwen2.5-dapo": (0.515, 1.85),
            "magistral": (0.535, 1.44), "minimax-m1": (0.610, 1.77),
        },
    ),
    # Committed before its runs, with the rules of `staleness`; three seeds, later seven. PipelineRL has the lag of
    # `survivors`, the others eight updates a round, as in the paper.
    "recipes-stressed": Comparison(
        "the same recipes at a rate of 1e-3, and those with PipelineRL at a lag that is held at 8",
        RECIPES | {
            "scalerl": HELD[8],
            "magistral": f"{RECIPES['magistral']} --max_ready 0 --min_ready {7 * 53}",
        },
        setting=f"{GRADED.replace('2000000', '1200000')} --lr 1e-3",
    ),
    "length": Comparison(
        "how thinking is kept short, and what is cut off (section 3.2)",
        {"interruption": "", "penalty": "--length_control penalty", "none": "--length_control none"},
        paper={"penalty": EQUAL},
    ),
    # Committed before its runs, after a pilot of each (seed 100). A problem of 2, 3 or 4 operations needs 6, 9
    # or 12 tokens of thinking; the paper's longer context is slower at first, higher in the end (Table 1).
    "context": Comparison(
        "a thinking budget that the longest problems need, and two that are shorter (the paper: 32k and 14k tokens)",
        {"14-18": "", "9-11": "--min_budget 9 --max_budget 11", "6-8": "--min_budget 6 --max_budget 8"},
        paper={"9-11": near(-0.035), "6-8": LOWER},
    ),
    "batch": Comparison(  # there 512, 768 and 2048 completions
        "prompts per optimizer step, at equal tokens",
        {
            "batch-32": "",
            "batch-16": "--batch_prompts 16 --max_ready 16 --eval_every 20",
            "batch-64": "--batch_prompts 64 --max_ready 64 --eval_every 5",
        },
        paper={"batch-16": near(-0.005), "batch-64": HIGHER},
    ),
    # Both committed before their runs, after a pilot (seed 100); three seeds. The paper: a small batch stagnates early
    # on problems that are never trained on, while its own curve rises; math and code together have parallel curves.
    "downstream": Comparison(
        "prompts per optimizer step, and harder problems that are never trained on (evidence/halves.py)",
        {
            "batch-64": "--batch_prompts 64 --max_ready 64 --eval_every 5",
            "batch-16": "--batch_prompts 16 --max_ready 16 --eval_every 20",
        },
        setting=f"{HALVES} --eval_dataset hard={HARD}",
        sets=("hard",),
        paper={"batch-16": LOWER},
    ),
    "two-sets": Comparison(
        "two data sets in one run, each with a curve of its own (evidence/halves.py)",
        {"both": ""},
        setting=HALVES.replace("easy.jsonl:exact", f"easy.jsonl:exact,{HARD}").replace("1200000", "2000000"),
        sets=("easy", "hard"),
    ),
    "rollouts": Comparison(
        "completions per prompt, at equal completions per step",
        {
            "rollouts-16": "",
            "rollouts-8": "--rollouts 8 --batch_prompts 64 --max_ready 64",
            "rollouts-32": "--rollouts 32 --batch_prompts 16 --max_ready 16",
        },
        paper={"rollouts-8": near(-0.025), "rollouts-32": near(-0.015)},
    ),
    "sizes": Comparison(  # the learning rate is 7e-4 sqrt(96 / width). Then, in runs/ablate/sizes:
        # fit_power_law.py {0.058M=xs,0.102M=s,0.226M=m,0.505M=l,1.009M=xl}/seed-{0,1,2}/eval.jsonl --fit-until 0.3
        "five sizes of the model, of which the small ones predict the largest (arXiv 2509.25300)",
        {
            "m": "",
            "xs": "--size xs --lr 9.9e-4 --max_sampled_tokens 1500000",
            "s": "--size s --lr 8.6e-4",
            "l": "--size l --lr 5.7e-4",
            "xl": "--size xl --lr 4.8e-4",
        },
        paper={"xs": LOWER, "s": LOWER, "l": HIGHER, "xl": HIGHER},  # ScaleRL's 8B and 17B x 16: .610 and .710
        setting=f"{GRADED} --max_sampled_tokens 1000000 --eval_every 5",
        minutes=2.2,
    ),
    "reuse": Comparison(  # 300 steps of 32 prompts are 9,600, of which 1/tau are distinct; none is retired
        "how often a prompt may be seen (arXiv 2509.25300: 25 times do no harm, 100 do)",
        {
            "tau-1": "--prompts 9600",
            "tau-5": "--prompts 1920",
            "tau-25": "--prompts 384",
            "tau-100": "--prompts 96",
        },
        setting=f"{GRADED} --max_sampled_tokens 0 --max_steps 300 --pass_rate_threshold 1.1",
        paper={"tau-5": EQUAL_END, "tau-25": EQUAL_END, "tau-100": LOWER_END},
    ),
    "order": Comparison(  # one pass: 300 steps of 32 prompts, and those under way at the end
        "easy prompts first or shuffled, in each epoch or in one pass",
        {
            "shuffled": "",
            "easy-first": "--prompt_order easy_first",
            "one-pass": "--prompts 9900",
            "one-pass-easy-first": "--prompts 9900 --prompt_order easy_first",
        },
        against={"one-pass-easy-first": "one-pass"},
        paper={"easy-first": EQUAL, "one-pass-easy-first": EQUAL},  # ScaleRL's abstract: a curriculum moves no ceiling
    ),
    "regularizers": Comparison(  # the coefficients are ours
        "KL with an entropy bonus, or neither (arXiv 2603.12151: both on easy problems, neither on hard ones)",
        {
            "easy": "--difficulty easy",
            "easy-kl-entropy": "--difficulty easy --kl_coef 0.01 --entropy_coef 0.01",
            "hard": "--difficulty hard",
            "hard-kl-entropy": "--difficulty hard --kl_coef 0.01 --entropy_coef 0.01",
        },
        against={"hard-kl-entropy": "hard"},
        paper={"easy-kl-entropy": HIGHER_END, "hard-kl-entropy": LOWER_END},
        pass_rate=0.3,
    ),
    "grid-easy": grid("easy"),
    "grid-hard": grid("hard"),
}  # fmt: skip
