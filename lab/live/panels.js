// ---------------------------------------------------------------------------------------------------------- a group
function show({ groups, trained, version }) { // the group with most silenced tokens, or else with a thought that paid
  const silenced = (g) => g.rollouts.flatMap((r) => r.factors).filter((f) => f === 0).length;
  const thought = (g) => g.rollouts.some((r) => r.reward > 0 && r.ids.length > 5);
  const worth = (g) => 2 * silenced(g) + thought(g);
  const learning = groups.filter((g) => trained.includes(g.number));
  const words = (ids) => ids.map((id) => DATA.words[id]).join(" ");
  const g = (learning.length ? learning : groups).reduce((a, b) => (worth(b) > worth(a) ? b : a));
  const lines = [...g.rollouts].sort((a, b) => b.reward - a.reward).map((r) => {
    const line = document.createElement("div"), head = document.createElement("b");
    head.textContent = r.A ? `${r.A > 0 ? "+" : "−"}${Math.abs(r.A).toFixed(1)}` : "0";
    line.append(head, ...r.ids.map((_, i) => token(r, i, version)));
    return line;
  });
  const asked = document.createElement("div");
  asked.textContent = `${words(g.p.prompt_ids.slice(0, -1))} → ${words(g.p.answer.slice(0, -1))}`;
  $("group").replaceChildren(asked, ...lines), choose(0, -1);
  $("rewards").innerHTML = groups.map((group) => {
    const rewards = group.rollouts.map((r) => r.reward), pale = rewards.every((r) => r === rewards[0]) ? "pale" : "";
    const cells = rewards.map((r) => `<i class="${pale} ${r > 0 ? "right" : ""}"></i>`);
    return `${cells.join("")}<span>${group === g ? "←" : ""}</span>`;
  }).join("");
  const right = (group) => group.rollouts.filter((r) => r.reward > 0).length;
  $("rewards").ariaLabel = `right, of 16: ${groups.map(right).join(", ")}`;
}
function token(r, i, version) {
  const element = document.createElement("i"), word = DATA.words[r.ids[i]];
  const age = version - r.versions[i], f = r.factors?.[i], p = (logprob) => Math.exp(logprob).toFixed(3);
  element.textContent = { "</think>": "⇒", "<eos>": "." }[word] ?? word;
  element.title = `${word}: nobody wrote it, the model was told to stop`;
  element.className = r.versions[i] < 0 ? "forced" : f === 0 ? "none" : "";
  if (r.versions[i] < 0) return element;
  element.style.background = `rgb(var(--age) / ${Math.min(0.08 * age, 0.5)})`;
  element.title = `${word}: written by version ${r.versions[i]}, ${age} updates ago.`;
  if (f !== undefined) { // its group trains
    const ratio = Math.exp(r.now[i] - r.logprobs[i]).toFixed(2);
    element.title += ` Probability then ${p(r.logprobs[i])}, now ${p(r.now[i])}: ratio ${ratio}, `;
    element.title += `factor ${f.toFixed(2)}.`;
  }
  return element;
}
function choose(row, column) { // a token, by hover, tap or arrow keys; column -1: none
  $("group").querySelector(".chosen")?.classList.remove("chosen");
  const lines = $("group").querySelectorAll("div + div"), at = Math.max(0, Math.min(row, lines.length - 1));
  const tokens = lines[at]?.querySelectorAll("i") ?? [];
  chosen = [at, Math.min(column, tokens.length - 1)];
  tokens[chosen[1]]?.classList.add("chosen");
  const help = "Point at a token (a word or digit), or use the arrow keys: the group stays.";
  $("token").firstChild.textContent = tokens[chosen[1]]?.title ?? help;
}
$("group").onpointerover = $("group").onclick = ({ target }) => {
  const line = target.parentNode, place = (x) => [...x.parentNode.children].indexOf(x) - 1;
  if (target.tagName === "I") choose(place(line), place(target));
};
$("group").onkeydown = (event) => {
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (move) event.preventDefault(), choose(chosen[0] + move[0], Math.max(0, chosen[1] + move[1]));
};

// ----------------------------------------------------------------- the pictures: curve, workers, table of all runs
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
function canvas(id) { // -> its context, with a pixel of the page as unit, and its width and height
  const element = $(id), width = element.clientWidth, height = element.clientHeight, ratio = devicePixelRatio || 1;
  element.width = width * ratio, element.height = height * ratio;
  const c = element.getContext("2d");
  c.scale(ratio, ratio), (c.font = "12px system-ui, sans-serif");
  return [c, width, height];
}
function axis() { // what stands below, and how far it goes
  const key = $("axis").value, least = { sampled: 100_000, step: 64, seconds: 30 }[key];
  return { key, most: Math.max(least, ...runs.flatMap((r) => r.curve.map((e) => e[key]))) };
}
function forecast() { // the law, fitted anew once there are five evaluations
  const { key, most } = axis(), C = run.curve.map((e) => e[key]);
  const grid = Array.from({ length: 49 }, (_, i) => ((i + 1) / 49) * most);
  fitter?.terminate();
  if (C.length < 5) return;
  fitter = new Worker(FIT);
  fitter.onmessage = ({ data }) => (law = data);
  fitter.postMessage({ C, R: run.curve.map((e) => e.pass_rate), n: C.map(() => DATA.held_out.length), grid, key });
}
function draw_curve() {
  const [c, width, height] = canvas("curve"), { key, most } = axis(), digits = (v) => v.toFixed(2).replace("0.", ".");
  const X = (v) => 34 + (v / most) * (width - 52), Y = (p) => height - 20 - p * (height - 30);
  const path = (points, draw) => {
    c.beginPath();
    points.forEach(([x, y], i) => (i ? c.lineTo(X(x), Y(y)) : c.moveTo(X(x), Y(y))));
    draw === "fill" ? c.fill() : c.stroke();
  };
  c.fillStyle = css("--soft"), (c.textAlign = "right");
  for (const p of [0, 0.25, 0.5, 0.75, 1])
    c.fillRect(34, Y(p), width - 52, 0.4), c.fillText(digits(p), 29, Y(p) + 4);
  c.textAlign = "center";
  const tick = { sampled: 20_000, step: 16, seconds: most > 60 ? 30 : 10 }[key];
  for (let v = 0; v <= most; v += tick) c.fillText(key === "sampled" ? `${v / 1000}k` : v, X(v), height - 5);
  c.textAlign = "left";
  if (law?.key === key && law.grid.length) {
    const side = (i) => law.grid.map((x, at) => [x, law.band[at][i]]);
    c.globalAlpha = 0.15, (c.fillStyle = css(run.color)), path([...side(0), ...side(1).reverse()], "fill");
    c.globalAlpha = 0.8, (c.strokeStyle = css("--soft")), path(law.grid.map((x, i) => [x, law.line[i]]));
    c.globalAlpha = 1;
    c.fillStyle = css("--soft");
    c.fillText(`ceiling ${digits(law.A[0])} to ${digits(law.A[1])}`, width - 120, Y(0) - 6);
  }
  for (const r of runs) {
    c.strokeStyle = c.fillStyle = css(r.color), (c.lineWidth = r === run ? 3 : 1.2);
    path(r.curve.map((e) => [e[key], e.pass_rate]));
    if (r.curve.length < 3) continue;
    const last = r.curve.at(-1), x = Math.min(X(last[key]) + 5, width - 32);
    if (r !== run) {
      c.fillText(r.number, x, Y(last.pass_rate) + 4);
      continue;
    }
    c.setLineDash([3, 4]), (c.lineWidth = 1.5), path(r.curve.map((e) => [e[key], e.thinks])), c.setLineDash([]);
    if (last.thinks < 0.9) c.fillText("think", x, Math.max(Y(last.thinks) - 5, 12));
    c.fillText("right", x, Y(last.pass_rate) + 14);
  }
}
function draw_workers(now) { // the last 12 seconds: when each of the two worked, and when new weights came
  const [c, width] = canvas("workers");
  const X = (t) => 76 + Math.max(0, 1 - (now - t) / 12000) * (width - 80);
  run.spans = run.spans.filter((s) => s.to > now - 12000);
  for (const s of run.spans) {
    const [from, to] = [X(s.from), X(s.to)], tests = s.what === "evaluate", y = s.who === "trainer" ? 42 : 6;
    c.fillStyle = css("--soft"), c.fillRect(from, tests ? y + 9 : y, Math.max(1, to - from), tests ? 8 : 26);
    if (s.who === "trainer") (c.fillStyle = css("--back")), c.fillRect(to - 1, y, 1, 26); // between two steps
    if (s.live) (c.fillStyle = css("--ink")), c.fillRect(to, 6, 1, 62);
  }
  for (const [who, y] of [["generator", 6], ["trainer", 42]]) {
    c.fillStyle = css("--ink"), c.fillText(who, 2, y + 18);
    c.strokeStyle = css("--soft"), c.strokeRect(76, y, width - 80, 26);
  }
}
function half({ curve }, key) { // where the curve crosses .5, on a straight line between two evaluations
  const i = curve.findIndex((e) => e.pass_rate >= 0.5), [a, b] = [curve[i - 1], curve[i]];
  return i < 1 ? NaN : a[key] + ((0.5 - a.pass_rate) / (b.pass_rate - a.pass_rate)) * (b[key] - a[key]);
}
function draw_table() {
  const head = ["run", "tokens to half", "steps to half", "solved", "age", "ignored", "trainer waited", "worked"];
  const percent = (v, digits) => `${(100 * v).toFixed(digits)} %`, seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;
  const rows = runs.slice(-6).map((r) => {
    const steps = r.step || 1, last = r.curve.at(-1)?.pass_rate ?? NaN;
    const cells = [`${(half(r, "sampled") / 1000).toFixed(0)}k`, half(r, "step").toFixed(0), percent(last, 0),
      (r.lag / steps).toFixed(1), percent(r.silenced / steps, 1), seconds(r.waited), seconds(r.worked)];
    const name = `<span style="color:var(${r.color})">${r === run ? "━━" : "──"}</span> ${r.number} ${r.name}`;
    return [name, ...cells.map((cell) => (cell.startsWith("NaN") ? "–" : cell))];
  });
  const line = (cells, tag) => `<tr>${cells.map((cell) => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  $("table").innerHTML = line(head, "th") + rows.map((row) => line(row, "td")).join("");
}
