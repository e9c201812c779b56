// The list of conversations: rows to open, rename and delete; a search; a file to keep or take over.
const NOTE_MS = 10000;
const SEARCH_MS = 150;
const part = (name) => element.querySelector(`[data-part="${name}"]`);
const search = element.querySelector("input[type=search]");
const file = element.querySelector("input[type=file]");
const act = (what, more = {}) => trigger("act", { do: what, ...more });
let noting = 0;
let searching = 0;
let hasRemoved = false;
let told = ""; // the number of the last thing that was told
let newest = props.value; // of all values: an older one may come later
const isOld = (value) => value.server === newest.server && value.at < newest.at;

function make(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function button(className, text, label, action) {
  const made = make("button", className, text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  if (label) made.title = label;
  made.addEventListener("click", action);
  return made;
}

function row({ id, title, busy }) {
  const isCurrent = id === newest.open;
  const item = make("li", `${busy ? "busy" : ""} ${isCurrent ? "current" : ""}`);
  const open = button("open", title, "", () => act("open", { id }));
  if (isCurrent) open.setAttribute("aria-current", "true");
  if (busy) open.append(make("span", "sr", " (is being answered)"));
  const remove = button("remove", "", `Delete ${title}`, () => {
    hasRemoved = true;
    act("remove", { id });
  });
  item.append(open, button("rename", "", `Rename ${title}`, () => rename(item, id, title)), remove);
  return item;
}

function rename(item, id, title) {
  const field = make("input", "");
  field.value = title;
  field.setAttribute("aria-label", "Name of the conversation");
  let isOver = false;
  const end = (isKept) => {
    if (isOver) return; // a field that is removed loses the focus, too
    isOver = true;
    const isNew = isKept && field.value.trim() !== title;
    item.classList.remove("edited");
    field.remove();
    if (isNew) act("rename", { id, text: field.value });
    show();
    element.querySelector(".open[aria-current]")?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") end(false);
    event.stopPropagation();
  });
  field.addEventListener("blur", () => end(true));
  item.classList.add("edited");
  item.prepend(field);
  field.select();
}

function showNote(text, canUndo) {
  part("note").textContent = text;
  element.querySelector(".note").classList.toggle("empty", !text);
  part("undo").hidden = !canUndo;
  clearTimeout(noting);
  if (text) noting = setTimeout(() => showNote("", false), NOTE_MS);
}

function download(conversations) {
  const made = document.createElement("a");
  const text = JSON.stringify(conversations, null, 1);
  made.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  made.download = "hotcold-conversations.json";
  made.click();
  setTimeout(() => URL.revokeObjectURL(made.href), NOTE_MS);
}

function show() {
  const { rows, any, query, removed, number, note, file: kept } = newest;
  if (number && number !== told) {
    told = number;
    if (kept) download(kept);
    if (note) showNote(note, false);
    if (hasRemoved && removed) showNote(`Deleted “${removed}”`, true);
    hasRemoved = false;
  }
  if (element.querySelector("li.edited")) return; // drawn when the name is written
  const focused = document.activeElement;
  const place = [...element.querySelectorAll("li button")].indexOf(focused);
  part("rows").replaceChildren(...rows.map(row));
  if (place >= 0) element.querySelectorAll("li button")[place]?.focus();
  const none = query ? "No conversation has these words." : "";
  part("none").textContent = rows.length ? "" : any ? none : "What you ask is kept in this browser.";
  element.querySelector("[data-do=export]").disabled = !any;
}

element.querySelector(".new").addEventListener("click", () => act("new"));
element.querySelector("[data-do=export]").addEventListener("click", () => act("export"));
element.querySelector("[data-do=import]").addEventListener("click", () => file.click());
part("undo").addEventListener("click", () => {
  showNote("", false);
  act("undo");
});
file.addEventListener("change", async () => {
  const text = await file.files[0]?.text();
  file.value = "";
  if (text) act("import", { text });
});
search.addEventListener("input", () => {
  clearTimeout(searching);
  searching = setTimeout(() => act("search", { text: search.value }), SEARCH_MS);
});
watch("value", () => {
  if (isOld(props.value)) return;
  newest = props.value;
  show();
});
show();
