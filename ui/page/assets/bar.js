// The bar: what runs and how it is, and what opens and closes: the list of conversations, the panel,
// the settings, and on a phone the views. The body's data attributes say it to the styles.
const STATES = {
  ready: "Ready",
  waiting: "Reading the question",
  answering: "Answering",
  error: "Error",
  lost: "No connection",
};
const KEPT = { panel: "hotcold-panel", theme: "hotcold-theme" };
const part = (name) => element.querySelector(`[data-part="${name}"]`);
const { body } = document;
const wide = matchMedia("(min-width: 1100px)");
const phone = matchMedia("(max-width: 760px)");
const isOpen = (name) => body.dataset[name] === "open";

function keep(name, value) {
  try {
    localStorage.setItem(KEPT[name], value);
  } catch {
    // A browser that keeps nothing: the choice lasts as long as the page.
  }
}

function kept(name) {
  try {
    return localStorage.getItem(KEPT[name]);
  } catch {
    return null;
  }
}

function set(name, open) {
  body.dataset[name] = open ? "open" : "closed";
  element.querySelector(`[data-open="${name}"]`).setAttribute("aria-expanded", String(open));
  if (name !== "panel") return;
  for (const tab of element.querySelectorAll("[data-view]")) {
    const isChosen = (tab.dataset.view === "panel") === open;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
  }
  window.dispatchEvent(new Event("hotcold-panel"));
}

// What covers other things takes the focus, and gives it back.
function turn(name, open) {
  set(name, open);
  if (name === "settings" || !wide.matches) {
    const first = `#${name} :is(button, input, textarea):not([tabindex="-1"], [hidden])`;
    if (open) document.querySelector(first)?.focus();
    else element.querySelector(`[data-open="${name}"]`).focus();
  }
}

function arrange() {
  set("side", wide.matches);
  set("panel", !phone.matches && (wide.matches ? kept("panel") !== "closed" : false));
  set("settings", false);
}

function useTheme(isDark) {
  body.classList.toggle("dark", isDark);
  window.dispatchEvent(new Event("hotcold-theme"));
}

function showFacts() {
  const { model, paths, facts } = props.value;
  const models = Object.keys(paths);
  const shown = models.length > 1 ? facts : [model, ...facts];
  part("facts").replaceChildren(
    ...shown.map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }),
  );
  part("models").hidden = models.length < 2;
  const choice = part("models").querySelector("select");
  const option = (name) => new Option(name, paths[name], name === model, name === model);
  choice.replaceChildren(...models.map(option));
}

function showState(state) {
  body.dataset.state = state;
  part("state").textContent = STATES[state];
}

element.addEventListener("click", (event) => {
  const { open, view } = event.target.closest("[data-open], [data-view]")?.dataset ?? {};
  const wanted = event.target.closest("[data-do]")?.dataset.do;
  if (open) turn(open, !isOpen(open));
  if (open === "panel" && wide.matches) keep("panel", body.dataset.panel);
  if (view) set("panel", view === "panel");
  if (wanted === "theme") {
    useTheme(!body.classList.contains("dark"));
    keep("theme", body.classList.contains("dark") ? "dark" : "light");
  }
});
element.addEventListener("keydown", (event) => {
  if (!event.target.dataset.view || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  set("panel", !isOpen("panel"));
  element.querySelector("[data-view][aria-selected=true]").focus();
});
element.querySelector("select").addEventListener("change", (event) => {
  location.assign(new URL(event.target.value, location.origin)); // each model has its page
});

// Whether there was something to close.
function close() {
  if (isOpen("settings")) turn("settings", false);
  else if (!wide.matches && isOpen("side")) turn("side", false);
  else return false;
  return true;
}

// As in other chats: Escape stops the answer, Ctrl+K searches, Ctrl+Shift+O begins a conversation.
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const key = event.key.toLowerCase();
  // The last of this id: a text above the field may have it, too.
  if (key === "escape" && !close()) [...document.querySelectorAll("#stop")].at(-1).click();
  if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
  if (key === "k" && !event.shiftKey) {
    event.preventDefault();
    set("side", true);
    document.querySelector("#conversations input[type=search]").focus();
  }
  if (key === "o" && event.shiftKey) {
    event.preventDefault();
    document.querySelector("#new").click();
    document.querySelector("#question textarea").focus();
  }
});
document.addEventListener("click", (event) => {
  const isOnVeil = event.target.id === "frame";
  if (isOnVeil || event.target.closest("#settings .close")) close();
  if (!wide.matches && isOpen("side") && event.target.closest("#conversations :is(.open, .new)")) {
    set("side", false);
    document.querySelector("#question textarea")?.focus();
  }
});
wide.addEventListener("change", arrange);
phone.addEventListener("change", arrange);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) => {
  useTheme(kept("theme") ? kept("theme") === "dark" : matches);
});
window.addEventListener("hotcold-state", () => showState(body.dataset.chat));
window.addEventListener("hotcold-lost", () => showState("lost"));
window.addEventListener("hotcold-found", () => showState(body.dataset.chat || "ready"));

if (kept("theme")) useTheme(kept("theme") === "dark");
watch("value", showFacts);
showFacts();
showState(body.dataset.chat || "ready");
arrange();
