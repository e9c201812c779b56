// Draws what the system does. Asks the server twice a second while the page can be seen and
// something runs, and not at all otherwise.
const POLL_MS = 500;
const QUIET_POLLS = 4; // without a running request, then it stops asking
const GLANCE_MS = 5000; // a visitor who moves sees what others do meanwhile

const KINDS = [
  ["hot", "hot, on the GPU"],
  ["computed", "cold, computed"],
  ["gate", "cold, only its gate"],
  ["skipped", "cold, skipped"],
];
// Without a GPU there is no hot neuron, so none has to be called cold.
const WITHOUT_GPU = { computed: "computed", gate: "only its gate", skipped: "skipped" };
const PARTS = ["attention", "ffn", "head", "predictor", "draft", "exchange", "python"];
const find = (name) => element.querySelector(`[data-show="${name}"]`);
const canvas = () => element.querySelector("canvas");
const cell = { layer: 0, bucket: 0, chosen: false };
let latest = null;
let timer = 0;
let quiet = 0;
let polledAt = 0;

function make(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function kindsOf(map) {
  const named = KINDS.map(([kind, words], index) => ({ kind, words, index }));
  if (map.hot) return named;
  return named.slice(1).map((each) => ({ ...each, words: WITHOUT_GPU[each.kind] }));
}

function view() {
  return element.querySelector('input[name="map-view"]:checked').value;
}

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
  const target = canvas();
  const layers = map.last.computed.length;
  const buckets = map.neurons[0].length;
  const height = Math.max(96, Math.min(layers * 24, 480));
  const scale = window.devicePixelRatio || 1;
  target.style.height = `${height}px`;
  target.width = Math.round(target.clientWidth * scale);
  target.height = Math.round(height * scale);
  const colours = getComputedStyle(element.querySelector("section"));
  const fills = KINDS.map(([kind]) => colours.getPropertyValue(`--${kind}`));
  const context = target.getContext("2d");
  const [w, h] = [target.width / buckets, target.height / layers];
  const gap = h > 8 * scale ? scale : 0;
  const totals = [0, 0, 0, 0];
  const most = view() === "chosen" ? mostChosen(map) : 0;
  context.fillStyle = fills[3];
  context.fillRect(0, 0, target.width, target.height);
  for (let layer = 0; layer < layers; layer++) {
    for (let bucket = 0; bucket < buckets; bucket++) {
      const counts = countsOf(map, layer, bucket);
      const neurons = map.neurons[layer][bucket] || 1;
      let bottom = (layer + 1) * h - gap;
      if (most && isExpert(map, layer, bucket)) {
        // Routers are far from even, so shades follow the square root.
        context.globalAlpha = Math.sqrt(map.experts.chosen[layer][bucket] / most);
        context.fillStyle = 2 * counts[0] > neurons ? fills[0] : fills[1];
        context.fillRect(bucket * w, layer * h, w + 0.5, h - gap);
        context.globalAlpha = 1;
        counts.forEach((count, kind) => (totals[kind] += count));
        continue;
      }
      counts.forEach((count, kind) => {
        totals[kind] += count;
        const size = (count / neurons) * (h - gap);
        context.fillStyle = fills[kind];
        if (kind < 3 && count > 0) context.fillRect(bucket * w, bottom - size, w + 0.5, size);
        bottom -= size;
      });
    }
  }
  return totals;
}

function showLegend(totals) {
  const legend = find("legend");
  const round = view() === "last" ? 0 : 1;
  legend.replaceChildren(
    ...kindsOf(latest.map).map(({ kind, words, index }) => {
      const item = make("li", "");
      const mark = make("i", "");
      mark.style.background = `var(--${kind})`;
      const digits = { minimumFractionDigits: round, maximumFractionDigits: round };
      const number = totals[index].toLocaleString("en", digits);
      const count = make("span", number);
      count.dataset.count = kind;
      item.append(mark, `${words}: `, count);
      return item;
    }),
  );
}

function showMap() {
  if (!latest || !canvas().checkVisibility()) return;
  const map = latest.map;
  const totals = drawMap(map);
  showLegend(totals);
  const all = totals.reduce((sum, count) => sum + count, 0) || 1;
  const share = (index) => `${((100 * totals[index]) / all).toFixed(1)}%`;
  const words = kindsOf(map).map(({ words: name, index }) => `${name} ${share(index)}`);
  const what = view() === "chosen" ? "experts chosen" : `${view()} token`;
  canvas().setAttribute("aria-label", `Neuron map, ${what}: ${words.join(", ")}`);
  if (cell.chosen) showCell();
}

function showCell() {
  if (!latest) return;
  const { map } = latest;
  const size = (end) => map.neurons[cell.layer].slice(0, end).reduce((sum, count) => sum + count, 0);
  const counts = countsOf(map, cell.layer, cell.bucket);
  const parts = kindsOf(map).map(({ words, index }) => `${words} ${+counts[index].toFixed(1)}`);
  const last = size(cell.bucket + 1) - 1;
  let place = `neurons ${size(cell.bucket)}–${last}`;
  if (isExpert(map, cell.layer, cell.bucket)) {
    const share = 100 * map.experts.chosen[cell.layer][cell.bucket];
    place = `expert ${cell.bucket}, chosen by ${share.toFixed(1)}% of tokens`;
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
  const choice = find("experts");
  choice.hidden = false;
  choice.querySelector("input").checked = true;
  find("sentence").textContent =
    "Each row is a layer of the model, each column an expert: the stronger its colour, the more " +
    "tokens chose it lately. The other choices show how many of an expert's neurons were needed: the fuller its bar, the more.";
}

function row(...cells) {
  const made = make("tr", "");
  made.append(...cells.map((cell) => (cell instanceof Node ? cell : make("td", cell))));
  return made;
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toLocaleString("en", { maximumSignificantDigits: 3 })} MB`;
}

// How long each part of a step takes, what it reads of the weights, and how fast.
function showStep({ per_step_ms: times, bytes }) {
  const total = times.total || 0;
  const parts = PARTS.filter((part) => times[part] > 0);
  find("idle").hidden = total > 0;
  find("steps").hidden = total === 0;
  find("step").textContent = total ? total.toPrecision(3) : "–";
  const piece = (part) => {
    const made = make("div", "");
    made.style.background = `var(--${part})`;
    made.style.width = `${(100 * times[part]) / total}%`;
    return made;
  };
  const line = (part) => {
    const name = make("td", part === "ffn" ? "FFN" : part === "python" ? "Python" : part);
    const mark = make("i", "");
    mark.style.background = `var(--${part})`;
    name.prepend(mark);
    const read = bytes[part] || 0;
    const rate = `${(read / times[part] / 1e6).toFixed(1)} GB/s`;
    return row(name, `${times[part].toFixed(2)} ms`, read ? megabytes(read) : "", read ? rate : "");
  };
  find("bar").replaceChildren(...parts.map(piece));
  find("parts").replaceChildren(...parts.map(line));
}

function showCaches(found) {
  const share = (part, all, what) => `${part.toLocaleString("en")} of ${all.toLocaleString("en")}${what}${all ? ` (${((100 * part) / all).toFixed(0)}%)` : ""}`;
  const { reads } = found;
  const lines = [
    ["prompts, found again", share(found.cached_tokens, found.prompt_tokens, " tokens")],
    ["KV cache, in use", share(found.kv_pages_used, found.kv_pages, " pages")],
  ];
  if (found.num_drafted) lines.push(["drafts, accepted", share(found.num_accepted, found.num_drafted, " tokens")]);
  if (reads.bytes_read !== undefined) {
    const percent = (number) => `${(100 * number).toFixed(1)}%`;
    lines.push(
      ["neurons, found in memory", percent(reads.hit_rate)],
      ["neurons, read from storage", `${megabytes(reads.bytes_read)} a step`],
      ["waiting for storage", `${percent(reads.wait_share)} of the time`],
    );
  }
  find("caches").replaceChildren(...lines.map((line) => row(...line)));
}

function gigabytes(bytes) {
  return `${(bytes / 2 ** 30).toFixed(2)} GiB`;
}

function showActors({ actors, host_memory_bytes, host_memory_used_bytes }) {
  const marks = { alive: "●", silent: "◐", restarting: "↻", dead: "✕" };
  find("actors").replaceChildren(
    ...actors.map((actor) => {
      const known = actor.pid > 0;
      const isOnCpu = actor.name === "gpu" && actor.device === "cpu";
      const line = row(
        isOnCpu ? "attention" : actor.name,
        `${marks[actor.state]} ${actor.state}`,
        known ? actor.pid : "–",
        actor.device || "–",
        known ? gigabytes(actor.memory_bytes) : "–",
      );
      line.dataset.actor = actor.name;
      return line;
    }),
  );
  const [used, all] = [gigabytes(host_memory_used_bytes), gigabytes(host_memory_bytes)];
  find("memory").textContent = `This machine: ${used} of ${all} in use.`;
}

function show(found) {
  window.dispatchEvent(new Event(found.isLost ? "hotcold-lost" : "hotcold-found"));
  if (found.error) {
    find("requests").textContent = found.error;
    return;
  }
  const isRunning = found.running + found.waiting > 0;
  // The last figures of a finished answer stay.
  if (latest && !isRunning && found.tokens_per_s === 0) {
    for (const name of ["tokens_per_s", "neurons_computed", "per_step_ms", "bytes", "reads", "num_drafted", "num_accepted"]) {
      found[name] = latest[name];
    }
  }
  if (latest && !isRunning && found.map.steps === 0) found.map = latest.map;
  if (!latest && found.map.experts !== null) showExperts();
  latest = found;
  find("speed").textContent = found.tokens_per_s ? Math.round(found.tokens_per_s) : "–";
  const share = (100 * found.neurons_computed).toFixed(1);
  find("share").textContent = found.tokens_per_s ? `${share}%` : "–";
  // A dense model computes all its neurons for each token: a map of them would tell nothing.
  const isEven = found.mode === "dense" && !found.map.hot && found.map.experts === null;
  find("neurons").hidden = find("computed").hidden = isEven;
  const waiting = found.waiting ? `, ${found.waiting} waiting` : "";
  find("requests").textContent = isRunning ? `${found.running} running${waiting}` : "";
  showMap();
  showStep(found);
  showCaches(found);
  showActors(found);
  element.dataset.steps = found.map.steps;
}

function isShown() {
  return element.checkVisibility();
}

async function poll() {
  timer = 0;
  polledAt = performance.now();
  let found = null;
  try {
    found = await server.telemetry();
  } catch {
    // As where there is no answer: Gradio makes nothing of most failures.
  }
  found ??= { error: "The server does not answer.", isLost: true };
  if (!element.isConnected) return;
  show(found);
  const isRunning = !found.error && (isAnswering() || found.running + found.waiting > 0);
  quiet = isRunning ? 0 : quiet + 1;
  if (quiet < QUIET_POLLS && isWanted() && timer === 0) timer = setTimeout(poll, POLL_MS);
  element.dataset.polling = timer === 0 ? "no" : "yes";
}

function watch() {
  quiet = 0;
  if (timer === 0 && isWanted()) timer = setTimeout(poll, 0);
}

// The open conversation waits for an answer or gets one: the page says so before the server counts it.
function isAnswering() {
  return ["waiting", "answering"].includes(document.body.dataset.chat);
}

// While an answer is under way, that the server is there is asked for by the whole page.
function isWanted() {
  return !document.hidden && (isShown() || isAnswering());
}

function glance() {
  if (performance.now() - polledAt > GLANCE_MS) watch();
}

element.addEventListener("change", showMap);
find("neurons").addEventListener("toggle", showMap);
canvas().addEventListener("pointermove", (event) => {
  if (!latest) return;
  const box = canvas().getBoundingClientRect();
  const across = (event.clientX - box.left) / box.width;
  const down = (event.clientY - box.top) / box.height;
  const { last, neurons } = latest.map;
  chooseCell(Math.floor(down * last.computed.length), Math.floor(across * neurons[0].length));
});
canvas().addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  chooseCell(cell.layer + move[0], cell.bucket + move[1]);
});
for (const name of ["resize", "hotcold-theme"]) window.addEventListener(name, showMap);
window.addEventListener("hotcold-panel", () => {
  showMap();
  watch();
});
window.addEventListener("hotcold-state", () => {
  if (isAnswering()) watch();
});
document.addEventListener("visibilitychange", watch);
document.addEventListener("pointermove", glance, { passive: true });
document.addEventListener("keydown", glance, { passive: true });
watch();
