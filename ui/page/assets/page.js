// The page's frame and its thread: what opens and closes, keys, branches, files of text. Styles go by
// the body's data attributes: `chat` is the state of the open conversation, `state` what the bar says.
const STATES = {
  ready: "Ready", waiting: "Reading the question", answering: "Answering", error: "Error", lost: "No connection",
}; // prettier-ignore
const GONE = "The server has ended or cannot be reached.";
const LOST = `${GONE.slice(0, -1)}: the answer broke off. Load the page again once it is back.`;
const HINT = "Enter sends, Shift+Enter begins a new line. Ctrl+K searches, Ctrl+Shift+O begins anew.";
const LARGEST_FILE = 256 * 1024; // bytes; few contexts hold more
const { body } = document;
const main = element.closest("#main");
const line = element.querySelector("p");
const wide = matchMedia("(min-width: 1100px)");
const phone = matchMedia("(max-width: 760px)");
// The last one within the chat: a text may have HTML of any id and class.
const last = (selector, place = main) => [...place.querySelectorAll(selector)].at(-1);
const find = (selector) => document.querySelector(selector); // what stands before the chat
const field = () => last("#question textarea");
const isAnswering = () => ["waiting", "answering"].includes(body.dataset.chat);
let word = null; // the server's last one for the line; said again, it takes no notice's place
let kept = {}; // where the browser keeps nothing, choices last as long as the page
try {
  kept = localStorage ?? kept;
} catch {
  // It refuses.
}

function make(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The list of conversations, "side", and the panel. What covers other things takes the focus.
function turn(name, open = body.dataset[name] !== "open") {
  const opener = find(`[data-open=${name}]`);
  body.dataset[name] = open ? "open" : "closed";
  opener.ariaExpanded = String(open);
  const first = `#${name} :is(button, input):not([tabindex="-1"], [hidden])`;
  return () => wide.matches || (open ? find(first) : opener)?.focus();
}

function arrange() {
  turn("side", wide.matches);
  turn("panel", wide.matches && kept["hotcold-panel"] !== "closed");
}

function showSettings() {
  const tab = last("#settings-button", document);
  if (!wide.matches) turn("side", false);
  turn("panel", true);
  tab.click();
  tab.focus();
}

function useTheme(isDark) {
  body.classList.toggle("dark", isDark);
  window.dispatchEvent(new Event("hotcold-theme"));
}

function say(state, text) {
  body.dataset.state = state;
  find("#bar .state span").textContent = STATES[state];
  if (text === undefined) return;
  line.textContent = text || HINT;
  line.classList.toggle("hint", !text);
}

function show() {
  const { state, text, empty } = props.value;
  Object.assign(body.dataset, { chat: state, empty: empty ? "yes" : "no" });
  const said = JSON.stringify([state, text]);
  say(state, said === word ? undefined : text);
  word = said;
  dress();
}

// What Gradio's messages lack, put there whenever it has painted: branches, and names of what scrolls.
function dress() {
  const { branches, id } = props.value;
  main.querySelectorAll(".message-row:not(.message-row *)").forEach((row, index) => {
    const [place, count] = branches[index] ?? [0, 1];
    const key = JSON.stringify([id, index, place, count]);
    const old = row.querySelector(":scope > .branches");
    if ((old?.dataset.key ?? key) === key && !old === count < 2) return;
    old?.remove();
    if (count < 2) return;
    const step = (label, text, to) => {
      const onclick = () => trigger("step", { index, place: to });
      return make("button", { ariaLabel: label, title: label, disabled: to < 0 || to >= count, onclick }, text);
    };
    const [back, on] = [step("Earlier branch", "‹", place - 1), step("Later branch", "›", place + 1)];
    const made = make("div", { className: "branches" }, back, make("span", {}, `${place + 1}/${count}`), on);
    made.dataset.key = key;
    row.append(made);
  });
  for (const code of main.querySelectorAll(".code_wrap:not([data-language])")) {
    const [, language] = code.querySelector("code")?.className.match(/language-(\S+)/) ?? [];
    code.dataset.language = language ?? "text";
    code.querySelector("pre")?.setAttribute("tabindex", "0"); // it scrolls sideways
  }
  for (const table of main.querySelectorAll("#chat table:not([tabindex])")) table.tabIndex = 0;
  for (const box of main.querySelectorAll("input[type=checkbox]:not([aria-label])")) {
    box.ariaLabel = box.checked ? "done" : "to do";
  }
  for (const text of main.querySelectorAll(".edit-textarea:not([aria-label])")) text.ariaLabel = "Edit the message";
}

function choose(options, done) {
  make("input", { type: "file", ...options, onchange: ({ target }) => done([...target.files]) }).click();
}

// Text becomes a part of the question here: no file reaches the server.
async function put(files) {
  for (const file of files) {
    const text = file.size > LARGEST_FILE ? null : await file.text();
    if (text === null || text.includes("\0") || text.includes("\ufffd")) {
      const why = text === null ? "is larger than 256 kB" : "holds no text";
      say(body.dataset.state, `${file.name} ${why}.`);
      continue;
    }
    const ticks = "`".repeat(Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)) + 1);
    const before = field().value.trim() ? `${field().value.trimEnd()}\n\n` : "";
    field().value = `${before}${file.name}:\n${ticks}\n${text.trimEnd()}\n${ticks}\n`;
    field().dispatchEvent(new Event("input", { bubbles: true }));
  }
  field().focus();
}

document.addEventListener("click", async ({ target }) => {
  const within = (selector) => target.closest(selector);
  const { open } = within("#bar [data-open]")?.dataset ?? {};
  if (open) turn(open)();
  if (open === "panel" && wide.matches) kept["hotcold-panel"] = body.dataset.panel;
  if (within("#bar .settings")) showSettings();
  if (within("#bar .theme")) {
    useTheme(!body.classList.contains("dark"));
    kept["hotcold-theme"] = body.classList.contains("dark") ? "dark" : "light";
  }
  if (within("#attach")) choose({ multiple: true }, put);
  if (within("#side #import")) {
    choose({ accept: ".json" }, async ([file]) => trigger("take", { text: await file.text() }));
  }
  const covers = !wide.matches && body.dataset.side === "open";
  if (within("#side #new")) field().focus();
  if (covers && within("#side #new, #side #rows label")) {
    turn("side", false);
    if (phone.matches) turn("panel", false);
    field().focus();
  } else if (covers && target.isConnected && !within("#side, [data-open]")) turn("side", false);
});
find("#bar select").addEventListener("change", ({ target }) => {
  location.assign(new URL(target.value, location.origin)); // each model has its page
});

// As in other chats: Escape stops the answer, Ctrl+K searches, Ctrl+Shift+O begins a conversation.
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const key = event.key.toLowerCase();
  if (event.target.matches(".edit-textarea")) {
    const [submit, cancel] = event.target.closest(".message-row").nextElementSibling.querySelectorAll("button");
    const pressed = key === "escape" ? cancel : key === "enter" && !event.shiftKey ? submit : null;
    if (pressed) event.preventDefault();
    pressed?.click();
  } else if (key === "enter" && event.target.closest("#name")) event.target.blur(); // names it, once
  else if (key === "escape" && !wide.matches && body.dataset.side === "open") turn("side", false)();
  else if (key === "escape") last("#question .stop-button").click();
  if (!(event.ctrlKey || event.metaKey) || event.altKey || key !== (event.shiftKey ? "o" : "k")) return;
  event.preventDefault();
  if (key === "k") turn("side", true);
  else find("#side #new").click();
  (key === "k" ? find("#search input") : field()).focus();
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault(); // else the browser would open the file in the page's place
    event.stopPropagation();
    if (name === "dragleave" && event.relatedTarget) return; // it is still over the page
    body.dataset.drop = name === "dragover" ? "yes" : "no";
    if (name === "drop") put([...event.dataTransfer.files]);
  }, true);
}

// The server does not answer: nothing of what it had begun goes on. Its next word says how it is.
window.addEventListener("hotcold-lost", () => {
  const text = isAnswering() ? LOST : line.textContent === LOST ? undefined : GONE;
  if (text === LOST) body.dataset.chat = "error";
  word = null;
  say("lost", text);
});
window.addEventListener("hotcold-found", () => (line.textContent === GONE ? show() : say(body.dataset.chat)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) => {
  useTheme(kept["hotcold-theme"] ? kept["hotcold-theme"] === "dark" : matches);
});
for (const width of [wide, phone]) width.addEventListener("change", arrange);
if (kept["hotcold-theme"]) useTheme(kept["hotcold-theme"] === "dark");
let begun = false; // one can write once the field is there
new MutationObserver(() => {
  dress();
  if (begun || !field()?.checkVisibility()) return;
  begun = true;
  if (document.activeElement === body) field().focus();
}).observe(main, { childList: true, subtree: true });
watch("value", show);
arrange();
show();
