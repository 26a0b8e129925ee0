// The two workers in which core.js runs. Each gets { role, settings, weights, kernel, port }. The port joins the two;
// what the page shows is posted to it.
const clock = () => performance.timeOrigin + performance.now(); // ms, the same in both workers and in the page

function run_generator(s, weights, port, post) {
  const generator = new Generator(s, weights), again = new MessageChannel();
  let wanted = false, asleep = true, since = 0; // the trainer waits; nothing to do; when this stretch of work began
  function span(what) {
    if (since) post({ kind: "span", who: "generator", what, from: since, to: clock() });
    since = 0;
  }
  function wake() {
    if (asleep) again.port2.postMessage(0);
    asleep = false;
  }
  function hand() {
    const groups = wanted && generator.take();
    const never = wanted && !groups && generator.exhausted && !generator.inside.length;
    if (!groups && !never) return;
    wanted = false;
    port.postMessage({ groups, sampled: generator.sampled }); // without groups: all prompts are retired
    wake();
  }
  again.port1.onmessage = () => { // one token a turn, so that messages come in between
    since ||= clock();
    if (generator.step()) again.port2.postMessage(0);
    else asleep = true;
    if (asleep || clock() - since > 200) span("sample");
    hand();
  };
  port.onmessage = ({ data }) => {
    if (data.weights) generator.model.flat.set(data.weights), (generator.version = data.version);
    if (data.release) generator.pacer.release(data.release), wake();
    if (data.take) (wanted = true), hand();
    if (data.evaluate !== undefined) {
      span("sample");
      since = clock();
      post({ kind: "eval", step: data.evaluate, sampled: generator.sampled, ...generator.evaluate() });
      span("evaluate"), wake(); // sampling begins after the first evaluation
    }
    if (data.stop) post({ kind: "end" }), port.close(), again.port1.close();
  };
}
async function run_trainer(s, weights, port, post) {
  const trainer = new Trainer(s, weights);
  let answer, step = 0;
  port.onmessage = ({ data }) => answer(data);
  while (step < s.steps) {
    if (step % s.eval_every === 0) port.postMessage({ evaluate: step });
    const waited = clock();
    port.postMessage({ take: true });
    const { groups, sampled } = await new Promise((resolve) => (answer = resolve));
    if (!groups) break; // all prompts are retired
    for (let i = 0; i < groups.length; i += s.B, step++) {
      const batch = groups.slice(i, i + s.B), from = clock(), version = trainer.version, stats = trainer.step(batch);
      if (i + s.B >= groups.length) { // in turns only after the last step of the turn
        const copy = trainer.model.flat.slice();
        port.postMessage({ weights: copy, version: trainer.version, release: groups.length }, [copy.buffer]);
      }
      const to = clock(), times = { waited: i ? 0 : from - waited, worked: to - from }; // ms
      post({ kind: "span", who: "trainer", what: "train", from, to, live: i + s.B >= groups.length });
      post({ kind: "step", step, version, sampled, ...times, ...stats, groups: batch });
    }
  }
  port.postMessage({ evaluate: step }), port.postMessage({ stop: true });
  if (step < s.steps) post({ kind: "retired", step });
}
globalThis.onmessage = async ({ data: { role, settings, weights, kernel, port } }) => {
  const s = { ...SETTINGS, ...settings }, post = (message) => globalThis.postMessage(message);
  try {
    if (!use_kernel(kernel)) post({ kind: "plain" });
    await (role === "generator" ? run_generator : run_trainer)(s, weights, port, post);
  } catch (error) {
    post({ kind: "error", message: `${role}: ${error.message}` });
  }
};
