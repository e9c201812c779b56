// Draws what the system does. Asks the server twice a second while the page can be seen and
// something runs, and not at all otherwise.
const POLL_MS = 500;
const QUIET_POLLS = 4; // without a running request, then it stops asking
const POLLS_LEFT_OUT = 9; // after an error

const KINDS = ["hot", "computed", "gate", "skipped"];
const WORDS = ["hot, on the GPU", "cold, computed", "cold, only its gate", "cold, skipped"];
// Without a GPU there is no hot neuron, so none has to be called cold.
const kindsOf = (map) =>
  KINDS.map((kind, index) => ({ kind, index, words: map.hot ? WORDS[index] : WORDS[index].replace("cold, ", "") }))
    .slice(map.hot ? 0 : 1);
const PARTS = {
  attention: "attention", ffn: "FFN", layers: "whole layers", head: "head", predictor: "predictor", draft: "draft",
  exchange: "exchange", python: "Python",
}; // prettier-ignore
const MARKS = { alive: "●", silent: "◐", restarting: "↻", dead: "✕" };
// What stays of a finished answer.
const LAST = ["tokens_per_s", "neurons_computed", "per_step_ms", "bytes", "sizes", "reads", "num_drafted", "num_accepted"];
const find = (name) => element.querySelector(`[data-show="${name}"]`);
const canvas = element.querySelector("canvas");
const number = (value, options) => value.toLocaleString("en", options);
const fixed = (value, digits) => number(value, { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share, digits = 1) => `${fixed(100 * share, digits)}%`;
// HTML of what the system tells of itself, which is no visitor's text.
const dot = (kind) => `<i style="background: var(--${kind})"></i>`;
const row = (...cells) => `<tr><td>${cells.join("<td>")}`;
const fill = (name, parts) => (find(name).innerHTML = parts.join(""));
const sum = (counts) => counts.reduce((all, count) => all + count, 0);
const cell = { layer: 0, bucket: 0, chosen: false };
let latest = null;
let quiet = 0;
let isAsking = false;
let leftOut = 0;

const view = () => find("view").value;

// Neurons of one cell by kind, in the order of KINDS.
function countsOf(map, layer, bucket) {
  const { computed, gates } = map[view() === "last" ? "last" : "mean"];
  const hot = map.hot ? map.hot[layer][bucket] : 0;
  const done = computed[layer][bucket];
  const gate = Math.max(gates[layer][bucket] - done, 0);
  if (map.steps === 0) return [hot, 0, 0, 0];
  return [hot, done, gate, Math.max(map.neurons[layer][bucket] - hot - done - gate, 0)];
}

// In a mixture, whether a cell is an expert that the layer's router chooses or leaves.
function isExpert(map, layer, bucket) {
  return map.experts !== null && bucket < map.experts.count[layer];
}

function mostChosen(map) {
  const routed = map.experts.chosen.flatMap((row, layer) => row.slice(0, map.experts.count[layer]));
  return Math.max(...routed, 0) || 1;
}

function drawMap(map) {
  const layers = map.last.computed.length;
  const buckets = map.neurons[0].length;
  const height = Math.max(4, Math.min(24, Math.floor(480 / layers))); // of a layer
  const bar = height > 8 ? height - 1 : height;
  canvas.width = buckets; // styles stretch it
  canvas.height = layers * height;
  canvas.style.height = `${canvas.height}px`;
  const fills = KINDS.map((kind) => {
    canvas.style.color = `var(--${kind})`;
    return getComputedStyle(canvas).color;
  });
  const context = canvas.getContext("2d");
  const totals = [0, 0, 0, 0];
  const most = view() === "chosen" ? mostChosen(map) : 0;
  context.fillStyle = fills[3];
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (let layer = 0; layer < layers; layer++) {
    for (let bucket = 0; bucket < buckets; bucket++) {
      const counts = countsOf(map, layer, bucket);
      const neurons = map.neurons[layer][bucket] || 1;
      let bottom = layer * height + bar;
      counts.forEach((count, kind) => (totals[kind] += count));
      if (most && isExpert(map, layer, bucket)) {
        // Routers are far from even, so shades follow the square root.
        context.globalAlpha = Math.sqrt(map.experts.chosen[layer][bucket] / most);
        context.fillStyle = 2 * counts[0] > neurons ? fills[0] : fills[1];
        context.fillRect(bucket, layer * height, 1, bar);
        context.globalAlpha = 1;
        continue;
      }
      counts.forEach((count, kind) => {
        const size = (count / neurons) * bar;
        context.fillStyle = fills[kind];
        if (kind < 3 && count > 0) context.fillRect(bucket, bottom - size, 1, size);
        bottom -= size;
      });
    }
  }
  return totals;
}

function showMap() {
  if (!latest) return;
  const kinds = kindsOf(latest.map);
  const totals = drawMap(latest.map);
  const all = sum(totals) || 1;
  const count = (index) => fixed(totals[index], view() === "last" ? 0 : 1);
  const item = ({ kind, words, index }) => `<li>${dot(kind)}${words}: <span data-count="${kind}">${count(index)}</span>`;
  fill("legend", kinds.map(item));
  const words = kinds.map((each) => `${each.words} ${percent(totals[each.index] / all)}`);
  const what = view() === "chosen" ? "experts chosen" : `${view()} token`;
  canvas.ariaLabel = `Neuron map, ${what}: ${words.join(", ")}`;
  if (cell.chosen) showCell();
}

function showCell() {
  if (!latest) return;
  const { map } = latest;
  const size = (end) => sum(map.neurons[cell.layer].slice(0, end));
  const counts = countsOf(map, cell.layer, cell.bucket);
  const parts = kindsOf(map).map(({ words, index }) => `${words} ${+counts[index].toFixed(1)}`);
  const last = size(cell.bucket + 1) - 1;
  let place = `neurons ${size(cell.bucket)}–${last}`;
  if (isExpert(map, cell.layer, cell.bucket)) {
    const share = percent(map.experts.chosen[cell.layer][cell.bucket]);
    place = `expert ${cell.bucket}, chosen by ${share} of tokens`;
  } else if (map.experts !== null && map.experts.count[cell.layer] > 0) {
    place = size(cell.bucket) > last ? "no expert" : "the shared expert, of all tokens";
  }
  find("where").textContent = `layer ${cell.layer}, ${place}: ${parts.join(", ")}`;
}

function chooseCell(layer, bucket) {
  if (!latest) return;
  const { map } = latest;
  cell.layer = Math.max(0, Math.min(map.last.computed.length - 1, layer));
  cell.bucket = Math.max(0, Math.min(map.neurons[0].length - 1, bucket));
  cell.chosen = true;
  showCell();
}

// Of a mixture the map begins with its experts.
function showExperts() {
  find("view").append(new Option("experts chosen", "chosen", true, true));
  find("sentence").textContent =
    "Each row is a layer of the model, each column an expert: the stronger its colour, the more " +
    "tokens chose it lately. The other choices show how many of an expert's neurons were needed: the fuller its bar, the more.";
}

// How long each part of a step takes, what it reads of the weights, and how fast.
function showStep({ per_step_ms: times, bytes, sizes }) {
  const total = times.total || 0;
  const parts = Object.keys(PARTS).filter((part) => times[part] > 0);
  find("idle").hidden = total > 0;
  find("steps").hidden = total === 0;
  find("step").textContent = total ? total.toPrecision(3) : "–";
  const piece = (part) => `<div style="background: var(--${part}); width: ${(100 * times[part]) / total}%"></div>`;
  const line = (part) => {
    const read = bytes[part] || 0;
    const reads = read ? [sizes[part], `${fixed(read / times[part] / 1e6, 1)} GB/s`] : ["", ""];
    return row(dot(part) + PARTS[part], `${fixed(times[part], 2)} ms`, ...reads);
  };
  fill("bar", parts.map(piece));
  fill("parts", parts.map(line));
}

function showCaches({ reads, ...found }) {
  const share = (part, all, what) =>
    `${number(part)} of ${number(all)} ${what}${all ? ` (${percent(part / all, 0)})` : ""}`;
  const lines = [
    ["prompts, found again", share(found.cached_tokens, found.prompt_tokens, "tokens")],
    ["KV cache, in use", share(found.kv_pages_used, found.kv_pages, "pages")],
  ];
  if (found.num_drafted) lines.push(["drafts, accepted", share(found.num_accepted, found.num_drafted, "tokens")]);
  if (reads.size !== undefined) {
    lines.push(
      ["neurons, found in memory", percent(reads.hit_rate)],
      ["neurons, read from storage", `${reads.size} a step`],
      ["waiting for storage", `${percent(reads.wait_share)} of the time`],
    );
  }
  fill("caches", lines.map((line) => row(...line)));
}

function showActors({ actors, memory }) {
  const line = ({ name, state, pid, device, memory: size }) => {
    const isOnCpu = name === "gpu" && device === "cpu";
    const process = pid > 0 ? [pid, device || "–", size] : ["–", device || "–", "–"];
    const told = row(isOnCpu ? "attention" : name, `${MARKS[state]} ${state}`, ...process);
    return told.replace("<tr", `<tr data-actor="${name}"`);
  };
  fill("actors", actors.map(line));
  find("memory").textContent = `This machine: ${memory} in use.`;
}

function show(found) {
  window.dispatchEvent(new Event(found.isLost ? "hotcold-lost" : "hotcold-found"));
  if (found.error) {
    find("requests").textContent = found.error;
    return;
  }
  const isRunning = found.running + found.waiting > 0;
  if (latest && !isRunning) {
    if (found.tokens_per_s === 0) for (const name of LAST) found[name] = latest[name];
    if (found.map.steps === 0) found.map = latest.map;
  }
  if (!latest && found.map.experts !== null) showExperts();
  latest = found;
  find("speed").textContent = found.tokens_per_s ? Math.round(found.tokens_per_s) : "–";
  find("share").textContent = found.tokens_per_s ? percent(found.neurons_computed) : "–";
  // A dense model computes all its neurons for each token: a map of them would tell nothing.
  const isEven = found.mode === "dense" && !found.map.hot && found.map.experts === null;
  find("neurons").hidden = find("computed").hidden = isEven;
  find("even").hidden = !isEven;
  const waiting = found.waiting ? `, ${found.waiting} waiting` : "";
  find("requests").textContent = isRunning ? `${found.running} running${waiting}` : "";
  showMap();
  showStep(found);
  showCaches(found);
  showActors(found);
}

// The open conversation waits for an answer or gets one: the page says so before the server counts it.
const isAnswering = () => ["waiting", "answering"].includes(document.body.dataset.chat);
const wake = () => (quiet = 0);

async function poll() {
  // While an answer is under way, that the server is there is asked for by the whole page.
  const isWanted = isAnswering() || (quiet < QUIET_POLLS && element.checkVisibility());
  element.dataset.polling = isWanted && !document.hidden ? "yes" : "no";
  if (element.dataset.polling === "no" || isAsking || leftOut-- > 0) return;
  isAsking = true;
  let found = null;
  try {
    found = await server.telemetry();
  } catch {
    // As where there is no answer: Gradio makes nothing of most failures.
  }
  isAsking = false;
  found ??= { error: "The server does not answer.", isLost: true };
  show(found);
  leftOut = found.error ? POLLS_LEFT_OUT : 0;
  quiet = found.error || found.running + found.waiting > 0 ? 0 : quiet + 1;
}

element.addEventListener("change", showMap);
canvas.addEventListener("pointermove", (event) => {
  if (!latest) return;
  const box = canvas.getBoundingClientRect();
  const across = (event.clientX - box.left) / box.width;
  const down = (event.clientY - box.top) / box.height;
  const { last, neurons } = latest.map;
  chooseCell(Math.floor(down * last.computed.length), Math.floor(across * neurons[0].length));
});
canvas.addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  chooseCell(cell.layer + move[0], cell.bucket + move[1]);
});
window.addEventListener("hotcold-theme", showMap);
// A visitor who moves sees what others do meanwhile.
for (const name of ["pointermove", "click", "keydown", "visibilitychange"]) {
  document.addEventListener(name, wake, { passive: true });
}
setInterval(poll, POLL_MS);
poll();
