"use strict";
// The fit of fit_sigmoid.py, curves.py and forecast.py, whose names it keeps. lab/live/build.py puts it into
// forecast.html and docs/index.html; lab/tests/test_forecast_page.py holds it against these files.
const EQ1 = "log-logistic", LN2 = Math.LN2, DOUBT = 2, REMAINS = 3, AHEAD = 3, MAX_WIDTH = 0.1, FLAT = 0.001, FALL = 4;
const B_RANGE = [0.1, 20], A_SLACK = 1.25, MIN_SD = 1e-4, PRIOR_DOF = 4, SAME = 0.01, MOST_AGAIN = 100, APART = 0.65;
const sum = (values, of = (v) => v) => values.reduce((total, v, i) => total + of(v, i), 0);
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const clip = (v, low, high) => Math.min(Math.max(v, low), high);
const linspace = (low, high, n) => Float64Array.from({ length: n }, (_, i) => (i === n - 1 ? high : low + (i * (high - low)) / (n - 1)));
// The normal distribution function: a table by the series of Abramowitz and Stegun, 26.2.11, and a parabola from there.
const PHI = linspace(-9, 9, 36865).map((z) => {
  let term = z, total = z;
  for (let odd = 3; Math.abs(term) > 1e-18 * Math.abs(total); odd += 2) total += term *= (z * z) / odd;
  return 0.5 + (total * Math.exp((-z * z) / 2)) / Math.sqrt(2 * Math.PI);
});
function normal(z) {
  const i = Math.round((clip(z, -9, 9) + 9) * 2048), x = i / 2048 - 9, d = clip(z, -9, 9) - x;
  return PHI[i] + ((d - (x * d * d) / 2) * Math.exp((-x * x) / 2)) / Math.sqrt(2 * Math.PI);
}
// Student's t for 95 %, by the angle whose probability is .95 (Abramowitz and Stegun, 26.7.3 and 26.7.4).
function student(dof) {
  const inside = (angle) => {
    const sine = Math.sin(angle), cosine = Math.cos(angle), odd = dof % 2;
    let term = odd ? cosine : 1, total = 0;
    for (let j = odd; j <= dof - 2; j += 2, term *= ((j - 1) / j) * cosine * cosine) total += term;
    return odd ? (2 / Math.PI) * (angle + sine * total) : sine * total;
  };
  let low = 0, high = Math.PI / 2;
  for (let i = 0; i < 60; i++) inside((low + high) / 2) < 0.95 ? (low = (low + high) / 2) : (high = (low + high) / 2);
  return Math.sqrt(dof) * Math.tan(low);
}

// The share of the gain at u = B log(C / C_mid).
const FORMS = {
  Weibull: (u) => -Math.expm1(-LN2 * Math.exp(Math.min(u, 50))),
  "log-normal": (u) => normal(u / 1.7),
  [EQ1]: (u) => 1 / (1 + Math.exp(-u)),
  Frechet: (u) => Math.exp(-LN2 * Math.exp(Math.min(-u, 50))),
};

// The best R0 and A for each shape, by weighted regression of R on 1 - s and s, with 0 <= R0 <= A <= A_SLACK.
function solve({ log_C, R, w, total_w }, form, log_B, log_C_mid) {
  const share = FORMS[form], G = log_B.length, more = 1e-12 * total_w;
  const [R0s, As, Qs, V00, V01, V11] = Array.from({ length: 6 }, () => new Float64Array(G));
  for (let g = 0; g < G; g++) {
    const B = Math.exp(log_B[g]);
    let rr = 0, rs = 0, ss = 0, rR = 0, sR = 0, RR = 0;
    for (let i = 0; i < R.length; i++) {
      const s = share(B * (log_C[i] - log_C_mid[g])), r = 1 - s, wR = w[i] * R[i];
      rr += w[i] * r * r, rs += w[i] * r * s, ss += w[i] * s * s, rR += wR * r, sR += wR * s, RR += wR * R[i];
    }
    const det = (rr + more) * (ss + more) - rs * rs;
    let A = clip(((rr + more) * sR - rs * rR) / det, 0, A_SLACK);
    const R0 = clip((rR - rs * A) / Math.max(rr, more), 0, clip(A, 0, 1));
    A = clip((sR - rs * R0) / Math.max(ss, more), R0, A_SLACK);
    const Q = RR - 2 * R0 * rR - 2 * A * sR + R0 * R0 * rr + 2 * R0 * A * rs + A * A * ss;
    R0s[g] = R0, As[g] = A, Qs[g] = Math.max(Q, 0);
    V00[g] = (ss + more) / det, V01[g] = -rs / det, V11[g] = (rr + more) / det;
  }
  return { log_B, log_C_mid, R0: R0s, A: As, Q: Qs, V00, V01, V11 };
}

// The curves with Q <= limit, or without a limit the best one, on a grid that closes in on them.
function scan({ whole, ...data }, form, limit = -Infinity) {
  const points = limit < 0 ? 31 : 61, grid = (of) => Float64Array.from({ length: points ** 2 }, (_, g) => of(g));
  let ends = whole, kept;
  for (let again = limit < 0 ? 12 : 4; again > 0; again--) {
    const [Bs, C_mids] = ends.map(([low, high]) => linspace(low, high, points));
    const all = solve(data, form, grid((g) => Bs[Math.floor(g / points)]), grid((g) => C_mids[g % points]));
    const highest = Math.max(limit, least(all.Q));
    kept = Object.fromEntries(Object.entries(all).map(([name, v]) => [name, v.filter((_, g) => all.Q[g] <= highest)]));
    ends = [[Bs, kept.log_B], [C_mids, kept.log_C_mid]].map(([axis, v], i) =>
      [least(v) + 3 * (axis[0] - axis[1]), most(v) + 3 * (axis[1] - axis[0])].map((end) => clip(end, ...whole[i])));
  }
  return kept;
}

// Least and greatest (1 - s) R0 + s A over all curves with Q <= limit; s(g) is the share of curve g.
function curve_ends(curves, s, limit) {
  let low = Infinity, high = -Infinity;
  for (let g = 0; g < curves.Q.length; g++) {
    const share = s(g), r = 1 - share, value = r * curves.R0[g] + share * curves.A[g];
    const spread = r * r * curves.V00[g] + 2 * r * share * curves.V01[g] + share * share * curves.V11[g];
    const reach = Math.sqrt(Math.max(limit - curves.Q[g], 0) * Math.max(spread, 0));
    low = Math.min(low, value - reach), high = Math.max(high, value + reach);
  }
  return [low, high];
}
// Variance of a point at dispersion 1: p (1 - p) / n, with one success and one failure added.
function variance(p, n) {
  if (n === null) return 1;
  const q = clip((p * n + 1) / (n + 2), 1e-6, 1 - 1e-6);
  return (q * (1 - q)) / n;
}
function predict(f, C, form = EQ1) {
  if (!f.best[form]) return NaN;
  const { log_B, log_C_mid, R0, A } = f.best[form], s = FORMS[form](Math.exp(log_B[0]) * (Math.log(C) - log_C_mid[0]));
  return Math.min((1 - s) * R0[0] + s * A[0], 1);
}

// Low and high pass rate at C: of the curve, or with `noise` of an evaluation there.
function interval(f, C, noise = false) {
  const forms = Object.keys(f.allowed);
  if (!forms.length) return [0, 1];
  const last = f.C.at(-1), reached = predict(f, last);
  const found = forms.flatMap((form) => {
    const curves = f.allowed[form], share = FORMS[form], log_C = Math.log(C);
    return curve_ends(curves, (g) => share(Math.exp(curves.log_B[g]) * (log_C - curves.log_C_mid[g])), f.limit);
  });
  let low = least(found), high = most(found);
  if (C > last) low = Math.min(low, reached), high = Math.max(high, reached + REMAINS * (predict(f, C) - reached));
  const line = on_the_line(f, C);
  low = clip(low, 0, 1), high = clip(Math.max(high, line), 0, 1);
  if (!noise) return [low, high];
  const p = clip(predict(f, C, f.form), low, high);
  const sd = Math.sqrt(f.dispersion * variance(p, f.n && median(f.n))) * f.t;
  return [Math.max(p - Math.hypot(p - low, sd), 0), Math.min(Math.max(p + Math.hypot(high - p, sd), line + sd), 1)];
}
function on_the_line(f, C) { // beyond the data: the line in log C through the last half of the points, to AHEAD times their compute
  const late = [...f.C.keys()].filter((i) => f.C[i] > 0 && f.C[i] >= f.C[f.C.length >> 1]), x = late.map((i) => Math.log(f.C[i]));
  const mean = (values) => sum(values) / values.length, x0 = mean(x), last = f.C.at(-1);
  const slope = Math.max(sum(late, (i, k) => (x[k] - x0) * f.R[i]) / Math.max(sum(x, (v) => (v - x0) ** 2), 1e-12), 0);
  return C > last ? mean(late.map((i) => f.R[i])) + slope * (Math.log(Math.min(C, AHEAD * last)) - x0) : 0;
}
function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

// Fit pass rates R at compute C, in order, with n samples behind each point (a list, or null); `pick` sees to what is not.
function fit(C, R, n = null) {
  const f = { C, R, n, best: {}, allowed: {}, form: EQ1, dispersion: NaN, R0: NaN, A: NaN, B: NaN, C_mid: NaN };
  const N = C.length, positive = C.filter((v) => v > 0);
  f.intervals = { A: [0, 1], B: [0, Infinity], C_mid: [0, Infinity] };
  f.prior = n ? PRIOR_DOF : 0, f.dof = N - 4 + f.prior;
  f.reason = `too few points: ${N}, with ${new Set(positive).size} different values of compute above 0; evaluate more often`;
  if (N - 4 < (n ? 0 : 1) || new Set(positive).size < 3) return f;
  const whole = [B_RANGE.map(Math.log), [Math.log(positive[0] / 10), Math.log(C[N - 1] * 30)]];
  let data;
  for (let again = 0; again < (n ? 3 : 1); again++) { // binomial weights need the curve, and the curve needs the weights
    const w = C.map((c, i) => 1 / variance(again ? predict(f, c) : R[i], n && n[i]));
    data = { log_C: C.map(Math.log), R, w, total_w: sum(w), whole };
    f.best[EQ1] = scan(data, EQ1);
  }
  for (const form in FORMS) f.best[form] ??= scan(data, form);
  f.t = student(f.dof);
  f.reason = see_noise(f, data) || see_ceiling(f, data);
  return f;
}

// Sets the dispersion. Returns why no ceiling can be asked for: the run falls, or is flat.
function see_noise(f, { w, total_w }) {
  const N = f.C.length, forms = Object.keys(f.best);
  f.form = forms.reduce((best, form) => (f.best[form].Q[0] < f.best[best].Q[0] ? form : best));
  const z = f.R.map((r, i) => Math.sqrt(w[i]) * (r - predict(f, f.C[i], f.form))), zz = sum(z, (v) => v * v), exact = (total_w / N) * MIN_SD ** 2;
  const groups = [...new Set(f.C)].map((c) => z.filter((_, i) => f.C[i] === c)), y = groups.map((v) => sum(v) / Math.sqrt(v.length)), P = y.length; // points of equal C have no order: their mean is the neighbor
  const r = Math.min(sum(y.slice(1), (v, i) => v * y[i]) / Math.max(sum(y, (v) => v * v), total_w * MIN_SD ** 2), 0.95);
  const alike = r > 1.645 / Math.sqrt(P) ? (1 + r) / (1 - r) : 1;
  f.dispersion = Math.max(((zz + f.prior) / f.dof) * alike, f.n ? Math.max(1, exact) : exact);
  const late = y.slice(-Math.max(3, Math.floor(P / 5))), late_points = sum(groups.slice(-late.length), (v) => v.length);
  const noise = Math.sqrt(Math.max(sum(y.slice(1), (v, i) => (v - y[i]) ** 2) / (P - 1) / 2, exact));
  const falls = (sum(late) / late.length) * Math.sqrt(late.length) < -FALL * noise;
  const mean = sum(f.R, (v, i) => v * w[i]) / total_w;
  const gained = sum(f.R, (v, i) => w[i] * (v - mean) ** 2) - f.best[f.form].Q[0];
  const drop = Math.max(gained, 0) / f.dispersion; // an F test with 2 and dof; a chi-square with 2 where n is known
  const flat = (f.n ? Math.exp(-drop / 2) : (1 + drop / f.dof) ** (-f.dof / 2)) > FLAT;
  const { R0, A, log_B, log_C_mid } = f.best[EQ1];
  if (flat) f.best = {}, f.form = EQ1;
  else Object.assign(f, { R0: R0[0], A: Math.min(A[0], 1), B: Math.exp(log_B[0]), C_mid: Math.exp(log_C_mid[0]) });
  const rates = [...new Set(f.C)].map((c) => f.R.filter((_, i) => f.C[i] === c)).map((v) => sum(v) / v.length), size = Math.max(3, Math.floor(P / 5));
  const stretches = rates.slice(size - 1).map((_, i) => sum(rates.slice(i, i + size)) / size), best = most(stretches), end = stretches.at(-1);
  const error = Math.sqrt(sum(rates.slice(1), (v, i) => (v - rates[i]) ** 2) / (P - 1) / size); // of a difference of two means
  if (P >= 2 * size && best - end > Math.max(best / 2, FALL * error)) return `the run collapsed, from ${best.toFixed(2)} in its best stretch to ${end.toFixed(2)} now: nothing says where it ends`;
  if (falls) return `the last ${late_points} points lie below the curve: the run falls, and nothing says where it ends`;
  return flat ? as_it_is(f) : "";
}

function as_it_goes({ R }) { // of a run that does not rise: its level, and from where to where evaluations lie if it goes on so; NaN where all are alike
  const N = R.length, level = sum(R.slice(N >> 1)) / (N - (N >> 1)), mean = sum(R) / N, sd = Math.sqrt(sum(R, (v) => (v - mean) ** 2) / (N - 1));
  const reach = sd > MIN_SD ? 3.5 * sd : NaN;
  return [level, clip(level - reach, 0, 1), clip(level + reach, 0, 1)];
}
function as_it_is(f) {
  const [level, low, high] = as_it_goes(f).map((v) => v.toFixed(3));
  const goes_on = low === "NaN" ? "its points are all alike, so nothing says how far an evaluation may lie from it" : `if it goes on as it is, an evaluation lies in [${low}, ${high}] (about 94 %)`;
  return `the pass rate does not rise beyond its noise by C = ${short(f.C.at(-1))}: no curve to fit. Its level is ${level}; ${goes_on}. Of 369 flat beginnings of public runs 116 rose by more than .05 later, 58 fell and 195 stayed`;
}

// Sets the allowed curves and the intervals. Returns why A's is too wide to tell the ceiling, if it is.
function see_ceiling(f, data) {
  const last = f.C.at(-1), margin = DOUBT * f.dispersion * f.t ** 2;
  f.limit = f.best[f.form].Q[0] + margin;
  for (const form in f.best) if (f.best[form].Q[0] <= f.limit) f.allowed[form] = scan(data, form, f.limit);
  const around = scan(data, EQ1, f.best[EQ1].Q[0] + margin); // also where another form excludes it
  [["B", around.log_B], ["C_mid", around.log_C_mid]].forEach(([name, logs], i) => {
    const [first, end] = data.whole[i];
    f.intervals[name] = [least(logs) < first + 0.05 ? 0 : Math.exp(least(logs)), most(logs) > end - 0.05 ? Infinity : Math.exp(most(logs))];
  });
  const reached = predict(f, last), expected = f.best[EQ1].A[0];
  const tops = Object.values(f.allowed).flatMap((curves) => curve_ends(curves, () => 1, f.limit));
  const low = least([reached, ...tops]), high = most([reached + REMAINS * (expected - reached), on_the_line(f, Infinity), ...tops]);
  f.intervals.A = [Math.max(low, 0), Math.min(high, 1)];
  if (!(high - low > Math.min(MAX_WIDTH, (f.A - f.R0) / 2) || f.C_mid < f.C[0])) return "";
  const late = f.C[0] > f.C_mid ? `; the first point is at ${(f.C[0] / f.C_mid).toFixed(1)} C_mid, too late` : "";
  return `ceilings from ${f.intervals.A[0].toFixed(2)} to ${f.intervals.A[1].toFixed(2)} fit: the data reach ${reached.toFixed(2)} by C = ` +
    `${short(last)}, ${(last / f.C_mid).toFixed(1)} C_mid${late}`;
}
function short(v) { // 1234567 -> "1.23M", in Python's format .3g
  if (!Number.isFinite(v) || v === 0) return v > 0 ? "inf" : String(v);
  const k = clip(Math.floor((Math.log10(Math.abs(v)) + 2e-4) / 3), 0, 6), [digits, power] = (v / 1000 ** k).toExponential(2).split("e").map(Number);
  const long = `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  return (power < -4 || power >= 3 ? long : String(Number((v / 1000 ** k).toPrecision(3)))) + ["", "k", "M", "G", "T", "P", "E"][k];
}
