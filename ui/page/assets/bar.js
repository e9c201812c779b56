// The bar: what runs and how it is, and what opens and closes: the list of conversations and the
// panel with the settings. The body's data attributes say it to the styles.
const STATES = {
  ready: "Ready",
  waiting: "Reading the question",
  answering: "Answering",
  error: "Error",
  lost: "No connection",
};
const find = (selector) => element.querySelector(selector);
const { body } = document;
const wide = matchMedia("(min-width: 1100px)");
const phone = matchMedia("(max-width: 760px)");
const isOpen = (name) => body.dataset[name] === "open";
const opener = (name) => find(`[data-open="${name}"]`);
let kept = {}; // where the browser keeps nothing, choices last as long as the page
try {
  kept = localStorage ?? kept;
} catch {
  // It refuses.
}

function set(name, open) {
  body.dataset[name] = open ? "open" : "closed";
  opener(name).ariaExpanded = String(open);
}

// What covers other things takes the focus, and gives it back.
function turn(name, open) {
  set(name, open);
  if (wide.matches) return;
  const first = `#${name} :is(button, input):not([tabindex="-1"], [hidden])`;
  (open ? document.querySelector(first) : opener(name))?.focus();
}

function showSettings() {
  // The last of this id: a text may have it, too.
  const tab = [...document.querySelectorAll("#settings-button")].at(-1);
  if (!wide.matches) set("side", false);
  tab.click();
  set("panel", true);
  tab.focus();
}

// A conversation was opened or begun: what lies over it closes.
function showChat() {
  set("side", false);
  if (phone.matches) set("panel", false);
  document.querySelector("#question textarea").focus();
}

function arrange() {
  set("side", wide.matches);
  set("panel", wide.matches && kept["hotcold-panel"] !== "closed");
}

function useTheme(isDark) {
  body.classList.toggle("dark", isDark);
  window.dispatchEvent(new Event("hotcold-theme"));
}

function showFacts() {
  const { model, paths, facts } = props.value;
  const models = Object.keys(paths);
  find(".facts").textContent = (models.length > 1 ? facts : [model, ...facts]).join(" · ");
  find("label").hidden = models.length < 2;
  const option = (name) => new Option(name, paths[name], name === model, name === model);
  find("select").replaceChildren(...models.map(option));
}

function showState(state = body.dataset.chat || "ready") {
  body.dataset.state = state;
  find(".state span").textContent = STATES[state];
}

element.addEventListener("click", ({ target }) => {
  const { open } = target.closest("[data-open]")?.dataset ?? {};
  if (open) turn(open, !isOpen(open));
  if (open === "panel" && wide.matches) kept["hotcold-panel"] = body.dataset.panel;
  if (target.closest(".settings")) showSettings();
  if (!target.closest(".theme")) return;
  useTheme(!body.classList.contains("dark"));
  kept["hotcold-theme"] = body.classList.contains("dark") ? "dark" : "light";
});
find("select").addEventListener("change", ({ target }) => {
  location.assign(new URL(target.value, location.origin)); // each model has its page
});

const covers = () => !wide.matches && isOpen("side");

// As in other chats: Escape stops the answer, Ctrl+K searches, Ctrl+Shift+O begins a conversation.
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const key = event.key.toLowerCase();
  if (key === "escape" && covers()) turn("side", false);
  else if (key === "escape") [...document.querySelectorAll("#stop")].at(-1).click();
  if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
  if (key !== (event.shiftKey ? "o" : "k")) return;
  event.preventDefault();
  if (key === "k") set("side", true);
  else document.querySelector("#new").click();
  document.querySelector(key === "k" ? "#side [type=search]" : "#question textarea").focus();
});
document.addEventListener("click", ({ target }) => {
  if (!wide.matches && target.closest("#side :is(.open, .new)")) showChat();
  else if (covers() && !target.closest("#side, [data-open]")) turn("side", false);
});
for (const width of [wide, phone]) width.addEventListener("change", arrange);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) => {
  useTheme(kept["hotcold-theme"] ? kept["hotcold-theme"] === "dark" : matches);
});
for (const name of ["hotcold-state", "hotcold-found"]) window.addEventListener(name, () => showState());
window.addEventListener("hotcold-lost", () => showState("lost"));

if (kept["hotcold-theme"]) useTheme(kept["hotcold-theme"] === "dark");
watch("value", showFacts);
showFacts();
showState();
arrange();
