"use strict";
// ScaleRL in a browser tab: recipe.py's training in two workers, without a library. What is explained in a Python file
// keeps its name here; lab/tests/test_live.py holds it against that file, and the gradient against torch's.
//
// SYMBOLS. T tokens of one forward pass, V words, VP: V in whole panels of 8, H hidden size, N heads, KV of keys and
// values, D size of a head, F width of the MLP, L positions of a slot. Arrays are flat, row after row: element (i, j)
// of one with shape (I, J) is at i * J + j. H, D and F must be multiples of 8.

// -------------------------------------------------------------------------------------------- memory and products
// All arrays are views of one memory, so that the WebAssembly kernel reaches them. Nothing is ever freed.
const BYTES = 100 * 2 ** 20;
const memory = globalThis.WebAssembly && new WebAssembly.Memory({ initial: BYTES / 2 ** 16 });
const floats = new Float32Array(memory?.buffer ?? new ArrayBuffer(BYTES));
let top = 16;
function alloc(rows, columns = 1) { // (rows, columns), and slack: a product writes whole blocks of 4 rows
  const from = top;
  top += (4 * Math.ceil(rows / 4) * columns + 15) & ~7;
  if (top > floats.length) throw new Error("core.js: out of memory; raise BYTES.");
  return floats.subarray(from, from + rows * columns);
}

// Four rows of C = A B (+ C) in plain JavaScript: what kernel.wat does, where a browser has no WebAssembly SIMD.
function plain_block(K, panels, A, B, C, ldc, add) { // addresses in bytes
  for (let p = 0; p < panels; p++) for (let row = 0; row < 4; row++) for (let half = 0; half < 8; half += 4) {
    let a = A / 4 + row, b = B / 4 + 8 * K * p + half, c0 = 0, c1 = 0, c2 = 0, c3 = 0;
    for (let k = 0; k < K; k++, a += 4, b += 8) {
      const x = floats[a];
      c0 += x * floats[b], c1 += x * floats[b + 1], c2 += x * floats[b + 2], c3 += x * floats[b + 3];
    }
    const c = C / 4 + (row * ldc) / 4 + 8 * p + half;
    if (add) c0 += floats[c], c1 += floats[c + 1], c2 += floats[c + 2], c3 += floats[c + 3];
    floats[c] = c0, floats[c + 1] = c1, floats[c + 2] = c2, floats[c + 3] = c3;
  }
}
let block = plain_block;
function use_kernel(bytes) { // those of kernel.wasm. Returns whether this browser can run them: else three times slower
  try { block = new WebAssembly.Instance(new WebAssembly.Module(bytes), { js: { memory } }).exports.block; } catch {}
  return block !== plain_block;
}

const packed_A = alloc(4 * 4096), packed_B = alloc(512 * 4096);
// C (M, J) = A (M, K) B (K, J), or C += A B with `add`. Element (i, k) of A is at i * ai + k * ak of its array, (k, j)
// of B at k * bk + j * bj: so a transpose costs nothing. A row of C has ldc columns, a multiple of 8.
function product(M, J, K, A, ai, ak, B, bk, bj, C, ldc, add = false) {
  const panels = Math.ceil(J / 8);
  let to = 0;
  for (let p = 0; p < J; p += 8) for (let k = 0; k < K; k++)
    for (let j = p; j < p + 8; j++) packed_B[to++] = j < J ? B[k * bk + j * bj] : 0;
  for (let i = 0; i < M; i += 4) {
    to = 0;
    for (let k = 0; k < K; k++)
      for (let row = i; row < i + 4; row++) packed_A[to++] = row < M ? A[row * ai + k * ak] : 0;
    block(K, panels, packed_A.byteOffset, packed_B.byteOffset, C.byteOffset + 4 * i * ldc, 4 * ldc, Number(add));
  }
}
// y (T, O) = x (T, I) W^T, for W (O, I)
const linear = (T, x, I, W, O, y, add) => product(T, O, I, x, I, 1, W, 1, I, y, O, add);
// dW (O, I) += dy^T x,    dx (T, I) = dy W
function linear_back(T, x, I, W, dW, O, dy, dx) {
  product(O, I, T, dy, 1, O, x, I, 1, dW, I, true);
  product(T, I, O, dy, O, 1, W, I, 1, dx, I);
}

// ------------------------------------------------------------------------------------------------------- the model
// The parts of the weights by name, views of `flat` in the order in which build.py writes them.
function named(flat, { V, H, LAYERS, N, KV, D, F }) {
  let at = 0;
  const part = (rows, columns = 1) => flat.subarray(at, (at += rows * columns));
  const w = { embedding: part(V, H), layers: [] }; // the embedding is the head, too
  for (let l = 0; l < LAYERS; l++) w.layers.push({
    norm1: part(H), qkv: part((N + 2 * KV) * D, H), q_norm: part(D), k_norm: part(D), out: part(H, N * D),
    norm2: part(H), gate_up: part(2 * F, H), down: part(H, F),
  });
  w.norm = part(H);
  if (at !== flat.length) throw new Error(`core.js: ${flat.length} weights, but this shape has ${at}.`);
  return w;
}

// y = w x r of one row of n numbers, r = 1 / sqrt(mean x^2 + eps), which is returned
function rms(x, x_at, w, n, y, y_at) {
  let sum = 0;
  for (let i = 0; i < n; i++) sum += x[x_at + i] ** 2;
  const r = 1 / Math.sqrt(sum / n + 1e-6);
  for (let i = 0; i < n; i++) y[y_at + i] = w[i] * x[x_at + i] * r;
  return r;
}
// dw_i += dy_i x_i r,    dx_i = (dx_i +) r (w_i dy_i - x_i r^2 / n sum_j w_j dy_j x_j)
function rms_back(x, x_at, w, n, r, dw, dy, dy_at, dx, dx_at, add) {
  let dot = 0;
  for (let i = 0; i < n; i++) dot += w[i] * dy[dy_at + i] * x[x_at + i];
  for (let i = 0; i < n; i++) {
    const more = r * (w[i] * dy[dy_at + i] - (x[x_at + i] * r * r * dot) / n);
    dw[i] += dy[dy_at + i] * x[x_at + i] * r;
    dx[dx_at + i] = add ? dx[dx_at + i] + more : more;
  }
}

// What one layer keeps of its forward pass over T <= most tokens; a trainer needs it for the way back.
const activations = (most, { H, N, KV, D, F, L }) => ({
  x: alloc(most, H), r1: alloc(most), h1: alloc(most, H), // what comes in, its 1 / rms, and normed
  qkv: alloc(most, (N + 2 * KV) * D), r_head: alloc(most, N + KV), q: alloc(most, N * D), // normed and turned
  p: alloc(most * N, L), att: alloc(most, N * D), // attention's shares, and what it brings
  mid: alloc(most, H), r2: alloc(most), h2: alloc(most, H), // after attention, and normed
  gate_up: alloc(most, 2 * F), act: alloc(most, F),
});

class Model {
  // Runs `most` tokens at a time, of sequences in `slots` slots. With `trains` it can also go backward and update.
  constructor(shape, weights, most, slots, trains) {
    const { V, H, LAYERS, N, KV, D, F, L } = shape, cache = () => alloc(slots * L, KV * D);
    this.shape = { ...shape, VP: 8 * Math.ceil(V / 8) };
    this.flat = alloc(weights.length), this.w = named(this.flat, shape);
    this.flat.set(weights);
    this.keys = [], this.values = [], this.a = [];
    for (let l = 0; l < LAYERS; l++) {
      this.keys.push(cache()), this.values.push(cache()); // (slots, L, KV * D)
      this.a.push(l && !trains ? this.a[0] : activations(most, shape)); // who samples needs one layer's at a time
    }
    this.x = alloc(most, H), this.r = alloc(most), this.h = alloc(most, H);
    this.cos = alloc(L, D / 2), this.sin = alloc(L, D / 2); // of position * 1e4^(-2i/D)
    for (let i = 0; i < (L * D) / 2; i++) {
      const angle = Math.floor(i / (D / 2)) * 1e4 ** (-(i % (D / 2)) / (D / 2));
      this.cos[i] = Math.cos(angle), this.sin[i] = Math.sin(angle);
    }
    this.logprobs = alloc(most, this.shape.VP);
    if (!trains) return;
    this.grad = alloc(weights.length), this.g = named(this.grad, shape);
    this.first = alloc(weights.length), this.second = alloc(weights.length), this.updates = 0; // AdamW's moments
    this.d = { // gradients of activations
      x: alloc(most, H), h: alloc(most, H), gate_up: alloc(most, 2 * F), act: alloc(most, F), keys: cache(),
      values: cache(), att: alloc(most, N * D), q: alloc(most, N * D), qkv: alloc(most, (N + 2 * KV) * D),
    };
  }

  // Rotary positions: turns the pairs (i, i + D/2) of one head; backwards with sign = -1.
  rotate(x, at, position, sign) {
    const half = this.shape.D / 2;
    for (let i = 0, p = position * half; i < half; i++, p++) {
      const c = this.cos[p], s = sign * this.sin[p], a = x[at + i], b = x[at + half + i];
      x[at + i] = a * c - b * s, x[at + half + i] = b * c + a * s;
    }
  }

  // Token t has id ids[t] and stands at pos[t] of the sequence in slot[t]; it sees that slot's positions up to its own.
  // logprobs (T, VP) are then those of the token after it; without `head` only keys and values are computed.
  forward(T, ids, slot, pos, head = true) {
    const { V, VP, H, LAYERS, N, KV, D, F, L } = this.shape, { w } = this, QKV = (N + 2 * KV) * D;
    for (let t = 0; t < T; t++) this.a[0].x.set(w.embedding.subarray(ids[t] * H, ids[t] * H + H), t * H);
    for (let l = 0; l < LAYERS; l++) {
      const a = this.a[l], layer = w.layers[l], keys = this.keys[l], values = this.values[l];
      for (let t = 0; t < T; t++) a.r1[t] = rms(a.x, t * H, layer.norm1, H, a.h1, t * H);
      linear(T, a.h1, H, layer.qkv, QKV, a.qkv);
      for (let t = 0; t < T; t++) {
        const kv = (slot[t] * L + pos[t]) * KV * D; // where its keys and values go
        for (let n = 0; n < N + KV; n++) { // first the heads' queries, then the keys
          const y = n < N ? a.q : keys, at = n < N ? (t * N + n) * D : kv + (n - N) * D;
          const norm = n < N ? layer.q_norm : layer.k_norm;
          a.r_head[t * (N + KV) + n] = rms(a.qkv, t * QKV + n * D, norm, D, y, at);
          this.rotate(y, at, pos[t], 1);
        }
        values.set(a.qkv.subarray(t * QKV + (N + KV) * D, (t + 1) * QKV), kv);
      }
      this.attend(T, slot, pos, a, keys, values);
      a.mid.set(a.x.subarray(0, T * H));
      linear(T, a.att, N * D, layer.out, H, a.mid, true);
      for (let t = 0; t < T; t++) a.r2[t] = rms(a.mid, t * H, layer.norm2, H, a.h2, t * H);
      linear(T, a.h2, H, layer.gate_up, 2 * F, a.gate_up);
      for (let t = 0; t < T; t++) for (let i = 0; i < F; i++) { // silu(z) up
        const z = a.gate_up[t * 2 * F + i], up = a.gate_up[t * 2 * F + F + i];
        a.act[t * F + i] = (z / (1 + Math.exp(-z))) * up;
      }
      const next = l + 1 < LAYERS ? this.a[l + 1].x : this.x;
      next.set(a.mid.subarray(0, T * H));
      linear(T, a.act, F, layer.down, H, next, true);
    }
    if (!head) return;
    for (let t = 0; t < T; t++) this.r[t] = rms(this.x, t * H, w.norm, H, this.h, t * H);
    product(T, V, H, this.h, H, 1, w.embedding, 1, H, this.logprobs, VP);
    for (let t = 0; t < T; t++) { // log p_j = z_j - log sum_i exp z_i
      const z = this.logprobs.subarray(t * VP, t * VP + V);
      let most = -Infinity, sum = 0;
      for (let j = 0; j < V; j++) most = Math.max(most, z[j]);
      for (let j = 0; j < V; j++) sum += Math.exp(z[j] - most);
      for (let j = 0; j < V; j++) z[j] -= most + Math.log(sum);
    }
  }

  // att = sum_s p_s v_s,    p_s = softmax_s(q . k_s / sqrt(D)), of each token and head
  attend(T, slot, pos, a, keys, values) {
    const { N, KV, D, L } = this.shape;
    a.att.fill(0, 0, T * N * D);
    for (let t = 0; t < T; t++) for (let n = 0; n < N; n++) {
      const q = (t * N + n) * D, p = (t * N + n) * L;
      const first = (slot[t] * L * KV + Math.floor((n * KV) / N)) * D; // this head's keys at position 0
      let most = -Infinity, sum = 0;
      for (let s = 0; s <= pos[t]; s++) {
        let dot = 0;
        for (let i = 0, k = first + s * KV * D; i < D; i++) dot += a.q[q + i] * keys[k + i];
        a.p[p + s] = dot / Math.sqrt(D);
        most = Math.max(most, a.p[p + s]);
      }
      for (let s = 0; s <= pos[t]; s++) sum += a.p[p + s] = Math.exp(a.p[p + s] - most);
      for (let s = 0; s <= pos[t]; s++) {
        const share = (a.p[p + s] /= sum);
        for (let i = 0, v = first + s * KV * D; i < D; i++) a.att[q + i] += share * values[v + i];
      }
    }
  }
  // dv_s += p_s datt,    dz_s = p_s (datt . v_s - datt . att),    dq += dz_s k_s / sqrt(D),    dk_s += dz_s q / sqrt(D)
  attend_back(T, slot, pos, a, keys, values) {
    const { N, KV, D, L } = this.shape, { d } = this;
    d.keys.fill(0), d.values.fill(0), d.q.fill(0, 0, T * N * D);
    for (let t = 0; t < T; t++) for (let n = 0; n < N; n++) {
      const q = (t * N + n) * D, p = (t * N + n) * L, first = (slot[t] * L * KV + Math.floor((n * KV) / N)) * D;
      let dot = 0;
      for (let i = 0; i < D; i++) dot += d.att[q + i] * a.att[q + i];
      for (let s = 0; s <= pos[t]; s++) {
        const share = a.p[p + s], at = first + s * KV * D;
        let dp = 0;
        for (let i = 0; i < D; i++) dp += d.att[q + i] * values[at + i];
        const dz = (share * (dp - dot)) / Math.sqrt(D);
        for (let i = 0; i < D; i++) {
          d.values[at + i] += share * d.att[q + i];
          d.q[q + i] += dz * keys[at + i];
          d.keys[at + i] += dz * a.q[q + i];
        }
      }
    }
  }

  // grad += the gradient of sum_t c[t] * (log-prob of target[t] after token t), after `forward` of the same tokens
  backward(T, ids, slot, pos, target, c) {
    const { V, VP, H, LAYERS, N, KV, D, F, L } = this.shape, { w, g, d } = this, QKV = (N + 2 * KV) * D;
    const dz = this.logprobs; // which become the gradients of the logits: d log p_y / d z_j = [j = y] - p_j
    for (let t = 0; t < T; t++) for (let j = 0; j < V; j++)
      dz[t * VP + j] = c[t] ? c[t] * (Number(j === target[t]) - Math.exp(dz[t * VP + j])) : 0;
    product(V, H, T, dz, 1, VP, this.h, H, 1, g.embedding, H, true);
    product(T, H, V, dz, VP, 1, w.embedding, H, 1, d.h, H);
    for (let t = 0; t < T; t++) rms_back(this.x, t * H, w.norm, H, this.r[t], g.norm, d.h, t * H, d.x, t * H, false);
    for (let l = LAYERS - 1; l >= 0; l--) {
      const a = this.a[l], w_l = w.layers[l], g_l = g.layers[l];
      linear_back(T, a.act, F, w_l.down, g_l.down, H, d.x, d.act);
      for (let t = 0; t < T; t++) for (let i = 0; i < F; i++) {
        const at = t * 2 * F + i, z = a.gate_up[at], s = 1 / (1 + Math.exp(-z)), da = d.act[t * F + i];
        d.gate_up[at] = da * a.gate_up[at + F] * s * (1 + z * (1 - s));
        d.gate_up[at + F] = da * z * s;
      }
      linear_back(T, a.h2, H, w_l.gate_up, g_l.gate_up, 2 * F, d.gate_up, d.h);
      for (let t = 0; t < T; t++)
        rms_back(a.mid, t * H, w_l.norm2, H, a.r2[t], g_l.norm2, d.h, t * H, d.x, t * H, true);
      linear_back(T, a.att, N * D, w_l.out, g_l.out, H, d.x, d.att);
      this.attend_back(T, slot, pos, a, this.keys[l], this.values[l]);
      for (let t = 0; t < T; t++) {
        const kv = (slot[t] * L + pos[t]) * KV * D;
        for (let n = 0; n < N + KV; n++) {
          const dy = n < N ? d.q : d.keys, at = n < N ? (t * N + n) * D : kv + (n - N) * D, x_at = t * QKV + n * D;
          const [norm, d_norm] = n < N ? [w_l.q_norm, g_l.q_norm] : [w_l.k_norm, g_l.k_norm];
          this.rotate(dy, at, pos[t], -1);
          rms_back(a.qkv, x_at, norm, D, a.r_head[t * (N + KV) + n], d_norm, dy, at, d.qkv, x_at, false);
        }
        d.qkv.set(d.values.subarray(kv, kv + KV * D), t * QKV + (N + KV) * D);
      }
      linear_back(T, a.h1, H, w_l.qkv, g_l.qkv, QKV, d.qkv, d.h);
      for (let t = 0; t < T; t++) rms_back(a.x, t * H, w_l.norm1, H, a.r1[t], g_l.norm1, d.h, t * H, d.x, t * H, true);
    }
    for (let t = 0; t < T; t++) for (let i = 0; i < H; i++) g.embedding[ids[t] * H + i] += d.x[t * H + i];
  }

  // AdamW (betas .9, .95, weight decay .01) with the gradient's norm clipped to 1, and 4 updates of warm-up: recipe.py
  update(rate) {
    const { flat, grad, first, second } = this, norm = Math.sqrt(grad.reduce((sum, v) => sum + v * v, 0));
    const lr = rate * Math.min(1, 0.2 + 0.2 * this.updates), clip = Math.min(1, 1 / (norm + 1e-6));
    const unbias1 = 1 - 0.9 ** ++this.updates, unbias2 = 1 - 0.95 ** this.updates;
    for (let i = 0; i < flat.length; i++) {
      const v = grad[i] * clip;
      first[i] = 0.9 * first[i] + 0.1 * v, second[i] = 0.95 * second[i] + 0.05 * v * v;
      flat[i] -= lr * (0.01 * flat[i] + first[i] / unbias1 / (Math.sqrt(second[i] / unbias2) + 1e-15));
    }
    grad.fill(0);
  }
}

// ------------------------------------------------------------------------------------ the task: tasks/arithmetic.py
const WORDS = ("<pad> <eos> <think> </think> wait again time up 0 1 2 3 4 5 6 7 8 9 a b c d e f g h +1 +2 +3 +4 +5 " +
  "+6 +7 +8 +9 -1 -2 -3 -4 -5 -6 -7 -8 -9 *3 *7 *9").split(" ");
const ID = Object.fromEntries(WORDS.map((word, i) => [word, i])), EOS = ID["<eos>"], END = ID["</think>"];
const PHRASE = ["time", "up", "</think>"].map((word) => ID[word]);

function random(seed) { // numbers in [0, 1): mulberry32
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), seed | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
const integer = (rng, n) => Math.floor(rng() * n); // below n
function problem(text) { // `7 a +5 b *3 <think>`, whose answer is the last two values, 2 6
  const words = text.split(" "), values = [Number(words[0])];
  for (let i = 2; i < words.length - 1; i += 2) {
    const sign = words[i][0], n = Number(words[i].slice(1)), x = values.at(-1);
    values.push((sign === "*" ? x * n : sign === "+" ? x + n : x - n + 10) % 10);
  }
  return { key: text, prompt_ids: words.map((word) => ID[word]), answer: [...values.slice(-2).map((x) => ID[x]), EOS] };
}
function draw_problems(seed, size, held_out) { // distinct ones of 2 to 4 operations
  const rng = random(seed), texts = new Set(), operations = WORDS.slice(ID["+1"]);
  while (texts.size < size) {
    const labels = "abcd".slice(0, 2 + integer(rng, 3));
    const steps = [...labels].map((label) => `${label} ${operations[integer(rng, operations.length)]}`);
    const text = `${integer(rng, 10)} ${steps.join(" ")} <think>`;
    if (!held_out.includes(text)) texts.add(text);
  }
  return [...texts].map(problem);
}
function correct(answer, ids) { // exactly the answer follows the first </think>
  const end = ids.indexOf(END);
  return end >= 0 && ids.slice(end + 1).join() === answer.join();
}

// ---------------------------------------------------------------------------------- losses.py and filters.py
const has_variance = (rewards) => rewards.some((r) => r !== rewards[0]);
// A_i = (r_i - mean_group(r)) / (std + eps): the std of all centered rewards of `groups`, lists of rewards
function normalize_advantages(groups) {
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const centered = groups.map((rewards) => rewards.map((r) => (has_variance(rewards) ? r - mean(rewards) : 0)));
  const std = Math.sqrt(mean(centered.flat().map((a) => a * a)));
  return centered.map((row) => row.map((a) => a / (std + 1e-6)));
}
// What stands before A grad log pi, for ratio = pi now / pi then
function factor(loss, ratio, A) {
  if (loss === "cispo") return Math.min(ratio, 5); // truncated, and no token is silenced
  if (loss === "no limit") return ratio;
  return (A > 0 && ratio > 1.2) || (A < 0 && ratio < 0.8) ? 0 : ratio; // grpo: PPO's clip
}
class PassRateHistory { // no positive resampling: a prompt retires once .9 of all its rollouts were right
  counts = new Map(); // key -> [solved, rollouts]
  gone = new Set();
  constructor(threshold = 0.9) { this.threshold = threshold; }
  update(key, corrects) {
    const [solved, rollouts] = this.counts.get(key) ?? [0, 0];
    const now = [solved + corrects.filter(Boolean).length, rollouts + corrects.length];
    this.counts.set(key, now);
    if (now[0] >= this.threshold * now[1] - 1e-6) this.gone.add(key);
  }
  retired(key) { return this.gone.has(key); }
}

// --------------------------------------------------------------------------- length_control.py and pipeline_rl.py
// What follows a first leg that ran into its budget: the phrase unless thinking had ended, and tokens for the answer
function second_leg(completion_ids, answer_budget) {
  const end = completion_ids.indexOf(END);
  if (end < 0) return { forced_ids: PHRASE, max_tokens: answer_budget };
  const left = answer_budget - (completion_ids.length - end - 1);
  return left > 0 ? { forced_ids: [], max_tokens: left } : null;
}

class Pacer { // who may start, and who must wait
  constructor(batch_prompts, k, schedule = "pipeline", min_ready = 0) {
    const turns = schedule === "ppo_off_policy";
    this.take_size = turns ? k * batch_prompts : batch_prompts; // groups the trainer takes
    this.capacity = turns ? k * batch_prompts : (k + 1) * batch_prompts;
    this.min_ready = min_ready;
    this.needed = this.admitted = this.training = 0; // most groups ever under way, numbers given out, groups taken
    this.groups = new Map(); // under way, in number order; null while the group runs
  }
  get outstanding() { return this.groups.size + this.training; }
  get ready() { // finished groups before the first one that still runs
    return [...this.groups.values(), null].indexOf(null);
  }
  may_take(count) { return this.ready >= count + this.min_ready; }
  may_admit() { // the bound; and the trainer would wait, or a group that was taken is replaced
    const replaces = this.min_ready === 0 && this.groups.size < this.needed;
    return this.outstanding < this.capacity && (!this.may_take(this.take_size) || replaces);
  }
  admit() {
    if (!this.may_admit()) throw new Error("no group may enter now");
    this.groups.set(this.admitted, null);
    this.needed = Math.max(this.needed, this.groups.size);
    return this.admitted++;
  }
  finish(group) {
    if (this.groups.get(group.number) !== null) throw new Error(`group ${group.number} is not running`);
    this.groups.set(group.number, group);
  }
  take(count) {
    if (!this.may_take(count)) return null;
    this.training += count;
    const taken = [...this.groups.values()].slice(0, count);
    for (const { number } of taken) this.groups.delete(number);
    return taken;
  }
  release(count) {
    if (count > this.training) throw new Error(`${count} groups released, but only ${this.training} are in training`);
    this.training -= count;
  }
}

// --------------------------------------------------------------------------------- generator.py and torch_engine.py
class Generator {
  constructor(s, weights) {
    this.s = s, this.slots = s.B * s.G, this.version = 0, this.sampled = 0; // tokens of finished groups
    const most = 11 * Math.max(this.slots, s.held_out.length); // tokens at a time: a prompt has 10, a phrase 3
    this.model = new Model(s.shape, weights, most, this.slots + s.held_out.length, false);
    this.rng = random(1000 + s.seed), this.history = new PassRateHistory(s.threshold);
    this.pacer = new Pacer(s.B, s.k, s.schedule, s.min_ready);
    this.held_out = s.held_out.map(problem), this.pool = draw_problems(s.seed, s.pool, s.held_out);
    this.order = [], this.inside = [], this.exhausted = false;
    this.free = Array.from({ length: this.slots }, (_, i) => i);
  }
  next_problem() { // epoch after epoch, each in an order of its own; undefined once all are retired
    const left = (p) => !this.history.retired(p.key);
    this.order = this.order.filter(left);
    if (!this.order.length) {
      const drawn = this.pool.filter(left).map((p) => [this.rng(), p]);
      this.order = drawn.sort(([a], [b]) => a - b).map(([, p]) => p);
    }
    return this.order.pop();
  }
  rollout(p, slot, budget, group) { // `left` tokens may still be sampled; `waiting` are not yet in the cache
    const waiting = [...p.prompt_ids];
    return { p, slot, group, ids: [], logprobs: [], versions: [], left: budget, waiting, at: 0, leg: 1, done: false };
  }
  prefill(rollouts) { // computes their prompts, all but the last token
    const ids = [], slot = [], pos = [];
    for (const r of rollouts)
      for (const id of r.waiting.splice(0, r.waiting.length - 1)) ids.push(id), slot.push(r.slot), pos.push(r.at++);
    if (ids.length) this.model.forward(ids.length, ids, slot, pos, false);
  }
  admit() {
    const { G, min_budget, max_budget, shape: { L, KV, D } } = this.s, entered = [];
    while (!this.exhausted && this.free.length >= G && this.pacer.may_admit()) {
      const p = this.next_problem();
      if (!p) {
        this.exhausted = true, this.pacer.min_ready = 0; // so that the last groups are trained as well
        break;
      }
      const group = { number: this.pacer.admit(), p, running: G };
      const budget = () => min_budget + integer(this.rng, max_budget - min_budget + 1);
      group.rollouts = Array.from({ length: G }, () => this.rollout(p, this.free.pop(), budget(), group));
      entered.push(group);
    }
    this.prefill(entered.map((group) => group.rollouts[0])); // once for each prompt: the others copy it
    for (const { rollouts: [first, ...others] } of entered) {
      for (const r of others) {
        const from = first.slot * L * KV * D, to = from + first.at * KV * D;
        for (const cache of [...this.model.keys, ...this.model.values]) cache.copyWithin(r.slot * L * KV * D, from, to);
        r.at = first.at, r.waiting = [...first.waiting];
      }
      this.inside.push(first, ...others);
    }
  }
  sample(rollouts) { // one token for each; new weights come between two calls, and old keys and values stay
    const ids = [], slot = [], pos = [], last = [], { V, VP } = this.model.shape;
    for (const r of rollouts) {
      for (const id of r.waiting) ids.push(id), slot.push(r.slot), pos.push(r.at++);
      last.push(ids.length - 1);
    }
    this.model.forward(ids.length, ids, slot, pos);
    rollouts.forEach((r, i) => {
      const logprobs = this.model.logprobs.subarray(last[i] * VP, last[i] * VP + V);
      let id = 0, u = this.rng();
      while (id < V - 1 && (u -= Math.exp(logprobs[id])) > 0) id++;
      r.ids.push(id), r.logprobs.push(logprobs[id]), r.versions.push(this.version), r.waiting = [id];
      if (id === EOS) r.done = true;
      else if (--r.left === 0) this.cut(r);
    });
  }
  cut(r) { // the leg's budget is spent
    const leg = r.leg === 1 ? second_leg(r.ids, this.s.answer_budget) : null;
    if (!leg) return (r.done = true);
    r.leg = 2, r.left = leg.max_tokens;
    r.waiting.push(...leg.forced_ids);
    for (const id of leg.forced_ids) r.ids.push(id), r.logprobs.push(0), r.versions.push(FORCED);
  }
  step() { // one token for all that are inside; returns whether there was work
    this.admit();
    if (!this.inside.length) return false;
    this.sample(this.inside);
    for (const r of this.inside.filter((r) => r.done)) {
      this.free.push(r.slot);
      r.correct = correct(r.p.answer, r.ids), r.reward = r.correct ? 1 : -1;
      if (--r.group.running) continue;
      this.pacer.finish(r.group);
      for (const { versions } of r.group.rollouts) this.sampled += versions.filter((v) => v !== FORCED).length;
    }
    this.inside = this.inside.filter((r) => !r.done);
    return true;
  }
  take() { // what crosses to the trainer; null: it must wait
    const groups = this.pacer.take(this.pacer.take_size);
    for (const { p, rollouts } of groups ?? []) this.history.update(p.key, rollouts.map((r) => r.correct));
    const plain = ({ ids, logprobs, versions, reward }) => ({ ids, logprobs, versions, reward });
    return groups?.map(({ number, p, rollouts }) => ({ number, p, rollouts: rollouts.map(plain) }));
  }
  evaluate() { // one answer to each held-out problem, with the longest budget and one version
    const all = this.held_out.map((p, i) => this.rollout(p, this.slots + i, this.s.max_budget, null));
    this.prefill(all);
    for (let left = all; left.length; left = left.filter((r) => !r.done)) this.sample(left);
    const share = (of) => all.filter(of).length / all.length;
    return { pass_rate: share((r) => correct(r.p.answer, r.ids)), thinks: share((r) => r.ids[0] !== END) };
  }
}
const FORCED = -1; // the "version" of a token that nobody sampled

// ----------------------------------------------------------------------------------------------------- the trainer
class Trainer {
  constructor(s, weights) {
    this.s = s, this.version = 0;
    this.model = new Model(s.shape, weights, s.G * (s.shape.L - 1), s.G, true);
  }
  // Adds the gradient of one step's loss to the model's, group by group:
  //     J = 1/P sum_g 1/n_g sum_{i in g} sum_t factor_it A_i log pi_it      over the P groups with n_g sampled tokens
  gradient(groups) {
    const trained = groups.filter((g) => !this.s.filter || has_variance(g.rollouts.map((r) => r.reward)));
    const advantages = normalize_advantages(trained.map((g) => g.rollouts.map((r) => r.reward)));
    const stats = { trained: trained.map((g) => g.number), tokens: 0, silenced: 0, lag: 0, max_lag: 0 };
    trained.forEach((g, n) => this.group_gradient(g, advantages[n], trained.length, stats));
    stats.lag /= stats.tokens || 1, stats.silenced /= stats.tokens || 1; // shares and means of the step
    return stats;
  }
  group_gradient(g, advantages, P, stats) { // for the page it leaves A in the rollouts, and each token's now and factor
    const ids = [], slot = [], pos = [], target = [], n_prompt = g.p.prompt_ids.length;
    g.rollouts.forEach((r, i) => {
      const all = [...g.p.prompt_ids, ...r.ids];
      for (let t = 0; t + 1 < all.length; t++) ids.push(all[t]), slot.push(i), pos.push(t), target.push(all[t + 1]);
      r.A = advantages[i], r.now = [], r.factors = [];
    });
    const T = ids.length, c = new Float32Array(T), { VP } = this.model.shape;
    const n_g = g.rollouts.flatMap((r) => r.versions).filter((v) => v !== FORCED).length;
    this.model.forward(T, ids, slot, pos);
    for (let t = 0; t < T; t++) {
      const r = g.rollouts[slot[t]], at = pos[t] + 1 - n_prompt, lag = this.version - r.versions[at];
      if (at < 0 || r.versions[at] === FORCED) continue; // the prompt and the phrase do not train
      if (!(lag >= 0 && lag <= this.s.k)) throw new Error(`a token of lag ${lag}, but the bound is ${this.s.k}`);
      const now = this.model.logprobs[t * VP + target[t]], log_ratio = now - r.logprobs[at];
      const f = factor(this.s.loss, Math.exp(Math.max(-20, Math.min(20, log_ratio))), r.A);
      c[t] = (-f * r.A) / (n_g * P); // of the loss, which is minimized
      r.now[at] = now, r.factors[at] = f;
      stats.tokens += 1, stats.silenced += Number(f === 0), stats.lag += lag;
      stats.max_lag = Math.max(stats.max_lag, lag);
    }
    this.model.backward(T, ids, slot, pos, target, c);
  }
  step(groups) {
    const stats = this.gradient(groups);
    if (!stats.tokens) return stats; // all groups had equal rewards: no update, so the version stays
    this.model.update(this.s.lr);
    this.version += 1;
    return stats;
  }
}

// recipe.py's
const SETTINGS = { B: 8, G: 16, k: 8, schedule: "pipeline", min_ready: 0, steps: 64, seed: 0, lr: 3.5e-4, loss: "cispo",
  filter: true, threshold: 0.9, pool: 128, min_budget: 14, max_budget: 18, answer_budget: 4, eval_every: 8 };
