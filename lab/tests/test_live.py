"""docs/index.html, the training in a browser tab. lab/live/core.js runs under node and is held against the files whose
names it keeps, and its gradient against torch's on a random model of another shape."""

import json
import os
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import filters
import losses
import pipeline_rl
from lab.live import build
from length_control import Interruption
from tasks.arithmetic import IDS, PHRASE, WORDS, ChainTask

CORE = (build.HERE / "core.js").read_text()
WORKERS = (build.HERE / "workers.js").read_text()
NODE = shutil.which("node")
if NODE is None and not os.environ.get("CI"):  # in CI (.ci/run, GitHub) it must be there
    pytest.skip("node is missing: lab/live/core.js is not tested here", allow_module_level=True)

SHAPE = {"V": 53, "H": 40, "LAYERS": 3, "N": 6, "KV": 3, "D": 8, "F": 72, "L": 32}
TINY = {"V": len(WORDS), "H": 8, "LAYERS": 1, "N": 1, "KV": 1, "D": 8, "F": 8, "L": 48}  # 864 weights


@pytest.fixture(scope="module")
def js():
    """js(call, *inputs): what the function `call` returns for each input, or the error's message. One node process for
    all tests, whose memory each call finds empty; core.js and DATA are at hand, and the first model's `weights`."""
    code = f"""{CORE}{WORKERS}
    const page = require("fs").readFileSync({json.dumps(str(build.PAGE))}, "utf8");
    const DATA = JSON.parse(page.match('<script id="data"[^>]*>(.*?)</script>')[1]);
    const halves = new Uint16Array(Uint8Array.from(Buffer.from(DATA.weights, "base64")).buffer);
    const weights = Float32Array.from(halves, (h) => {{
      const exponent = (h >> 10) & 31, fraction = h & 1023;
      return (h >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction / 2 ** 24);
    }});
    const settings = {{ ...SETTINGS, shape: DATA.shape, held_out: DATA.held_out }};
    if (!use_kernel(Buffer.from(DATA.kernel, "base64"))) throw new Error("node has no WebAssembly SIMD");
    const begin = top;
    require("readline").createInterface({{ input: process.stdin }}).on("line", async (line) => {{
      const {{ call, inputs }} = JSON.parse(line), outputs = [], f = eval(call);
      for (const input of inputs) {{
        floats.fill(0, begin, top), (top = begin);
        const output = await (async () => f(input))().catch((error) => error.message);
        outputs.push(JSON.stringify(output));
      }}
      console.log(`[${{outputs}}]`);
    }});"""

    def ask(call: str, *inputs):
        process.stdin.write(json.dumps({"call": call, "inputs": inputs}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with subprocess.Popen([NODE, "-e", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield ask


# ------------------------------------------------------------------------------------------------------------ the file


def test_the_page_is_what_the_build_makes():
    assert build.PAGE.read_text() == build.page(), "run python lab/live/build.py"


def test_one_file_without_a_network():
    html = build.PAGE.read_text()
    assert build.PAGE.stat().st_size <= 700_000
    assert "default-src 'none'" in html
    assert set(re.findall(r"https?://[^\s\"'<`]+", html)) <= {"http://localhost:8000"}
    assert not re.search(r"<(script|img|link|iframe)[^>]*\b(src|href)=(?!\"data:)", html)
    assert max(map(len, (CORE + WORKERS).splitlines())) <= 120
    assert len(CORE.splitlines()) <= 560


def test_the_kernel_is_its_text_assembled(tmp_path):
    assembler = shutil.which("wat2wasm")
    if assembler is None:
        pytest.skip("wat2wasm is missing: npm install wabt")
    subprocess.run([assembler, build.WAT, "-o", tmp_path / "kernel.wasm"], check=True)
    assert (tmp_path / "kernel.wasm").read_bytes() == build.WASM.read_bytes()


def test_the_address_of_the_repository_makes_links():
    assert '"address": "https://example.org/x/"' in build.page("https://example.org/x")


# ------------------------------------------------------------------------------------- gradients, log-probs and AdamW


def another_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=SHAPE["V"],
        hidden_size=SHAPE["H"],
        num_hidden_layers=SHAPE["LAYERS"],
        num_attention_heads=SHAPE["N"],
        num_key_value_heads=SHAPE["KV"],
        head_dim=SHAPE["D"],
        intermediate_size=SHAPE["F"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.15,
        rms_norm_eps=1e-6,
    )
    assert build.shape(config.to_dict()) == SHAPE | {"L": build.POSITIONS}
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():  # norms begin as ones
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def scored(model, rows):
    """Log-probs of the completions' tokens (N, L), zeros behind them, of (prompt, completion) pairs."""
    tokens = pad_sequence([torch.tensor(prompt + ids) for prompt, ids in rows], batch_first=True)  # (N, L)
    every = model(tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]  # (N, L - 1)
    of_ids = [row[len(prompt) - 1 :][: len(ids)] for row, (prompt, ids) in zip(every, rows, strict=True)]
    return pad_sequence(of_ids, batch_first=True)


def a_batch(model):
    """Four groups of four rollouts, one of equal rewards, with forced tokens and ratios on both sides of every bound."""
    rng, groups = random.Random(0), []
    for number, rewards in enumerate([[1, -1, -1, -1], [1, 1, -1, 1], [-1, -1, -1, -1], [1, -1, 1, -1]]):
        prompt, rollouts = [rng.randrange(SHAPE["V"]) for _ in range(rng.randint(4, 8))], []
        for reward in rewards:
            ids = [rng.randrange(SHAPE["V"]) for _ in range(rng.randint(4, 15))]
            versions = [rng.randint(1, 9) for _ in ids]
            if rng.random() < 0.5:
                versions[2:4] = [pipeline_rl.FORCED] * 2
            rollouts.append({"ids": ids, "versions": versions, "reward": reward})
        groups.append({"number": number, "p": {"prompt_ids": prompt}, "rollouts": rollouts})
    rollouts = [r for g in groups for r in g["rollouts"]]
    with torch.no_grad():
        now = scored(model, [(g["p"]["prompt_ids"], r["ids"]) for g in groups for r in g["rollouts"]])
    then = now + torch.randn(now.shape) * 0.6
    then[:, 0] = now[:, 0] - 1.8  # a ratio of 6
    for r, row in zip(rollouts, then.tolist(), strict=True):
        r["logprobs"] = row[: len(r["ids"])]
    return groups


LOSSES = {"cispo": losses.cispo, "grpo": losses.grpo, "no limit": lambda *a: losses.cispo(*a, eps_max=torch.inf)}


def of_torch(model, groups, loss, filtered):
    """(log-probs of trained tokens, gradient (P,)) as recipe.py computes them."""
    rows = [(g["p"]["prompt_ids"], r) for g in groups for r in g["rollouts"]]
    rewards = torch.tensor([float(r["reward"]) for _, r in rows])
    group_ids = torch.arange(len(groups)).repeat_interleave(4)
    keep = filters.has_variance(rewards, group_ids) if filtered else torch.ones(len(rows), dtype=torch.bool)
    rows = [row for row, kept in zip(rows, keep, strict=True) if kept]
    advantages = losses.normalize_advantages(rewards[keep], group_ids[keep])
    logprobs = scored(model, [(prompt, r["ids"]) for prompt, r in rows])  # (N, T)
    behaviour = pad_sequence([torch.tensor(r["logprobs"]) for _, r in rows], batch_first=True)
    sampled = [torch.tensor([float(v != pipeline_rl.FORCED) for v in r["versions"]]) for _, r in rows]
    mask = pad_sequence(sampled, batch_first=True)
    token_loss, metrics = LOSSES[loss](logprobs, behaviour, advantages, mask)
    model.zero_grad()
    (losses.aggregation_weights(mask, group_ids[keep]) * token_loss).sum().backward()
    assert loss == "no limit" or metrics["capped_positive"] + metrics["capped_negative"] > 3
    named = dict(model.named_parameters())
    gradient = torch.cat([named[name].grad.ravel() for name in build.order(SHAPE["LAYERS"])])
    return logprobs[mask.bool()].tolist(), gradient.numpy()


GRADIENT = """({ shape, weights, groups, cases }) => cases.map(([loss, filter, plain]) => {
  const kernel = block, batch = structuredClone(groups);
  if (plain) block = plain_block;
  const s = { ...settings, shape, G: 4, k: 8, loss, filter }, trainer = new Trainer(s, weights);
  trainer.version = 9;
  const stats = trainer.gradient(batch);
  block = kernel;
  const rows = batch.flatMap((g) => g.rollouts).filter((r) => r.now);
  const now = rows.flatMap((r) => r.now.filter((v) => v !== undefined));
  return { now, gradient: [...trainer.model.grad], tokens: stats.tokens, silenced: stats.silenced };
})"""


def test_log_probs_and_gradients_are_those_of_torch(js):
    model = another_model()
    groups, named = a_batch(model), dict(model.named_parameters())
    weights = torch.cat([named[name].detach().ravel() for name in build.order(SHAPE["LAYERS"])])
    cases = [
        ("cispo", True, False),
        ("cispo", True, True),
        ("cispo", False, False),
        ("grpo", True, False),
        ("no limit", True, False),
    ]
    given = {"shape": SHAPE, "weights": weights.tolist(), "groups": groups, "cases": cases}
    for (loss, filtered, _), outputs in zip(cases, js(GRADIENT, given)[0], strict=True):
        logprobs, gradient = of_torch(model, groups, loss, filtered)
        assert np.abs(np.subtract(outputs["now"], logprobs)).max() < 1e-4
        assert np.linalg.norm(outputs["gradient"] - gradient) < 1e-4 * np.linalg.norm(gradient)
        assert outputs["tokens"] == len(logprobs)
        assert (outputs["silenced"] > 0.05) == (loss == "grpo")


def test_updates_are_those_of_torch(js):
    """AdamW, the warm-up and the clipped norm over six updates: gradients with a norm of 20, then of .2."""
    torch.manual_seed(0)
    start = torch.randn(864) * 0.1
    weights, gradients = torch.nn.Parameter(start.clone()), [torch.randn(864) / 1.5 for _ in range(3)]
    optimizer = torch.optim.AdamW([weights], lr=3.5e-4, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    scales = [1, 1, 1, 0.01, 0.01, 0.01]
    for i, scale in enumerate(scales):
        weights.grad = gradients[i % 3] * scale
        torch.nn.utils.clip_grad_norm_([weights], 1.0)
        optimizer.step()
        warmup.step()
    (outputs,) = js(
        """({ shape, start, gradients, scales }) => {
      const { model } = new Trainer({ ...settings, shape, G: 4 }, start);
      scales.forEach((scale, i) => (model.grad.set(gradients[i % 3].map((v) => v * scale)), model.update(3.5e-4)));
      return [...model.flat];
    }""",
        {"shape": TINY, "start": start.tolist(), "gradients": [g.tolist() for g in gradients], "scales": scales},
    )
    way = (weights.detach() - start).norm()
    assert (torch.tensor(outputs) - weights.detach()).norm() < 1e-3 * way


# ---------------------------------------------------------------------------------------------------- the concepts


def walk(seed):
    """A Pacer's settings, 60 calls, and what each of them gives, errors among them."""
    rng = random.Random(seed)
    schedule = rng.choice(["pipeline", "pipeline", "ppo_off_policy"])
    batch, k = rng.randint(1, 5), rng.randint(schedule != "pipeline", 4)
    least = rng.choice([0, rng.randint(0, k * batch)]) if schedule == "pipeline" else 0
    pacer = pipeline_rl.Pacer(batch, k, schedule=schedule, min_ready=least)
    calls, outputs = [], []
    for _ in range(60):
        name = rng.choice(["admit"] * 4 + ["finish"] * 3 + ["take", "release"])
        running = [number for number, group in pacer._groups.items() if group is None]
        value = {"admit": 0, "finish": rng.choice(running) if running else 7, "take": pacer.take_size,
                 "release": rng.choice([pacer.training, pacer.take_size])}[name]  # fmt: skip
        try:
            if name == "finish":
                result = pacer.finish(pipeline_rl.Group(value, None, 0, []))
            elif name == "take":
                taken = pacer.take(value)
                result = taken and [group.number for group in taken]
            else:
                result = pacer.admit() if name == "admit" else pacer.release(value)
        except (RuntimeError, KeyError, ValueError):
            result = "error"
        calls.append((name, value))
        outputs.append([result, pacer.may_admit(), pacer.outstanding, pacer.ready, list(pacer._groups)])
    return [batch, k, schedule, least, calls], outputs


def test_the_pacer_is_that_of_pipeline_rl_in_200_settings(js):
    inputs, expected = zip(*map(walk, range(200)), strict=True)
    outputs = js(
        """([batch, k, schedule, min_ready, calls]) => {
      const pacer = new Pacer(batch, k, schedule, min_ready);
      return calls.map(([name, value]) => {
        let result;
        try { result = pacer[name](name === "finish" ? { number: value } : value); } catch { result = "error"; }
        if (name === "take") result = result?.map((group) => group.number);
        return [result ?? null, pacer.may_admit(), pacer.outstanding, pacer.ready, [...pacer.groups.keys()]];
      });
    }""",
        *inputs,
    )
    assert outputs == list(expected)
    results = [step[0] for steps in expected for step in steps]
    assert results.count("error") > 1000
    assert sum(isinstance(result, list) for result in results) > 200


def test_second_legs_are_those_of_length_control(js):
    rng, end = random.Random(0), IDS["</think>"]
    control = Interruption(14, 18, 4, [IDS[word] for word in PHRASE], [end])
    legs = [[end if rng.random() < 0.1 else rng.randint(8, 46) for _ in range(rng.randint(4, 18))] for _ in range(400)]
    expected = [control.second_leg([9], ids, "length") for ids in legs]
    assert js("(ids) => second_leg(ids, 4)", *legs) == [
        leg and {"forced_ids": leg.forced_ids, "max_tokens": leg.max_tokens} for leg in expected
    ]
    assert {leg and (len(leg.forced_ids), leg.max_tokens) for leg in expected} > {None, (3, 4), (0, 1), (0, 4)}


def test_advantages_and_the_filter_are_those_of_losses_and_filters(js):
    rng = random.Random(0)
    batches = [[[rng.choice([0.1, 1.0, -1.0]) for _ in range(4)] for _ in range(3)] + [[0.1] * 4] for _ in range(20)]
    for batch, (advantages, varied) in zip(
        batches, js("(b) => [normalize_advantages(b), b.map(has_variance)]", *batches), strict=True
    ):
        rewards, group_ids = torch.tensor(batch, dtype=torch.float64).ravel(), torch.arange(4).repeat_interleave(4)
        expected = losses.normalize_advantages(rewards, group_ids)
        assert np.ravel(advantages) == pytest.approx(expected.numpy(), abs=1e-9)
        assert varied == filters.has_variance(rewards, group_ids)[::4].tolist()


def test_the_history_is_that_of_filters(js):
    rng, history = random.Random(0), filters.PassRateHistory()
    keys = {"a": 0.5, "b": 0.8, "c": 0.85, "d": 0.9, "e": 1.0, "f": 0.0}  # pass rates
    visits, expected = [], []
    for _ in range(60):
        key = rng.choice("abcde")
        visits.append((key, [rng.random() < keys[key] for _ in range(10)]))
        history.update(*visits[-1])
        expected.append([history.retired(key) for key in keys])
    call = "([key, corrects]) => (history.update(key, corrects), [...'abcdef'].map((k) => history.retired(k)))"
    assert js(f"((history) => {call})(new PassRateHistory())", *visits) == expected
    assert 1 < sum(expected[-1]) < 6


def test_the_factors_are_the_gradients_of_losses(js):
    ratios = [0.13, 0.5, 0.79, 0.81, 0.996, 1.0, 1.003, 1.19, 1.21, 1.9, 4.9, 5.1, 8.0]
    grid = [(name, ratio, A) for name in LOSSES for ratio in ratios for A in (1.0, -1.0)]
    expected = []
    for name, ratio, A in grid:
        now = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        then = -torch.tensor([[ratio]], dtype=torch.float64).log()
        token_loss, _ = LOSSES[name](now, then, torch.tensor([A]), torch.ones(1, 1))
        (gradient,) = torch.autograd.grad(-token_loss.sum(), now)
        expected.append(gradient.item() / A)
    assert js("([name, ratio, A]) => factor(name, ratio, A)", *grid) == pytest.approx(expected, abs=1e-12)


# ------------------------------------------------------------------------------------------------- the task, the runs


def test_words_and_answers_are_those_of_the_task(js):
    task = ChainTask(0, build.DISCOVER_POOL)
    assert js("() => WORDS", 0) == [list(WORDS)]
    texts = [task.text(problem.prompt_ids) for problem in task.held_out]
    assert js("(text) => problem(text).answer.map((id) => WORDS[id]).join(' ')", *texts) == [
        f"{problem.answer} <eos>" for problem in task.held_out
    ]
    problem = task.held_out[0]
    ends = [f"</think> {problem.answer} <eos>", f"a </think> {problem.answer}", f"{problem.answer} <eos>",
            f"</think> {problem.answer} <eos> 1", f"</think> </think> {problem.answer} <eos>"]  # fmt: skip
    completions = [[IDS[word] for word in end.split()] for end in ends]
    outputs = js("([text, ids]) => correct(problem(text).answer, ids)", *[(texts[0], ids) for ids in completions])
    assert outputs == [right for _, right in task.score(problem, completions)]


def test_the_first_model_thinks_in_one_answer_of_fifty(js):
    """512 answers with its float16 weights: a standard error of .006. Their first token tells, so they are cut."""
    call = "(seed) => new Generator({ ...settings, seed, max_budget: 1, answer_budget: 1 }, weights).evaluate().thinks"
    shares = js(call, 0, 1)
    assert 0.01 <= np.mean(shares) <= 0.05


def test_at_lag_0_the_trainer_has_the_generators_log_probs(js):
    """In both legs of interrupted answers, too."""
    (outputs,) = js(
        """() => {
      const s = { ...settings, B: 3, G: 8, min_budget: 3, max_budget: 5, filter: false };
      const generator = new Generator(s, weights), trainer = new Trainer(s, weights);
      let groups;
      while (!(groups = generator.take())) generator.step();
      trainer.gradient(groups);
      const rows = groups.flatMap((g) => g.rollouts), forced = rows.filter((r) => r.versions.includes(FORCED)).length;
      return { forced, gaps: rows.flatMap((r) => r.logprobs.map((then, i) => (r.now[i] ?? 0) - then)) };
    }""",
        0,
    )
    assert outputs["forced"] > 0
    assert np.abs(outputs["gaps"]).max() < 1e-4


def test_a_token_above_the_bound_throws(js):
    (message,) = js(
        """() => {
      const trainer = new Trainer({ ...settings, G: 2 }, weights), row = (reward) => ({ ids: [8, 1], logprobs: [-1, -1], versions: [0, 1], reward });
      trainer.version = 9;
      return trainer.step([{ number: 0, p: { prompt_ids: [9, 2] }, rollouts: [row(1), row(-1)] }]);
    }""",
        0,
    )
    assert message == "a token of lag 9, but the bound is 8"


RUN = """(more) => new Promise((resolve) => {
  const weights = Float32Array.from({ length: 864 }, (_, i) => Math.sin(i));
  const s = { ...settings, held_out: DATA.held_out.slice(0, 8), B: 2, G: 4, eval_every: 4, ...more };
  const { port1, port2 } = new MessageChannel(), messages = [];
  const post = ({ groups, ...message }) => {
    messages.push({ ...message, versions: groups?.flatMap((g) => g.rollouts.flatMap((r) => r.versions)) });
    if (message.kind === "end") resolve(messages);
  };
  run_generator(s, weights, port1, post), run_trainer(s, weights, port2, post);
})"""


def test_short_runs_of_both_workers(js):
    """They evaluate before steps 0, 4 and at the end, and keep the bound; in turns all tokens are of the turn's version."""
    bounds = [({"k": 3}, 3), ({"k": 0}, 0), ({"k": 4, "schedule": "ppo_off_policy"}, 3), ({"k": 2, "min_ready": 4}, 2)]
    inputs = [more | {"shape": TINY, "steps": 8, "filter": False} for more, _ in bounds]
    for (more, lag), messages in zip(bounds, js(RUN, *inputs), strict=True):
        assert [m["step"] for m in messages if m["kind"] == "eval"] == [0, 4, 8]
        steps = [m for m in messages if m["kind"] == "step"]
        assert [m["step"] for m in steps] == list(range(8))
        assert max(m["max_lag"] for m in steps) <= lag
        if "schedule" in more:
            assert [set(m["versions"]) - {pipeline_rl.FORCED} for m in steps] == [{0}] * 4 + [{4}] * 4
        assert messages[-1]["kind"] == "end"
        assert not [m for m in messages if m["kind"] in ("retired", "error")]


def test_a_run_without_prompts_ends_in_words(js):
    """With a threshold of 0 each prompt retires when its first group is taken."""
    (messages,) = js(RUN, {"shape": TINY, "k": 1, "threshold": 0, "pool": 6, "filter": False})
    (retired,) = [m for m in messages if m["kind"] == "retired"]
    assert 3 <= retired["step"] < 64
    assert messages[-1]["kind"] == "end"
    assert [m["step"] for m in messages if m["kind"] == "eval"][-1] == retired["step"]
