// The list of conversations: rows to open, rename and delete; a search; a file to keep or take over.
const NOTE_MS = 10000;
const SEARCH_MS = 150;
const find = (selector) => element.querySelector(selector);
const act = (what, more = {}) => trigger("act", { do: what, ...more });
const file = find("input[type=file]");
let noting = 0;
let searching = 0;
let hasRemoved = false;
let told = ""; // the number of the last thing that was told
let newest = props.value; // of all values: an older one may come later
const isOld = (value) => value.server === newest.server && value.at < newest.at;

function row({ id, title, busy }) {
  const open = make("button", { type: "button", className: "open", onclick: () => act("open", { id }) }, title);
  if (id === newest.open) open.ariaCurrent = "true";
  if (busy) open.append(make("span", { className: "sr" }, " (is being answered)"));
  const item = make("li", {}, open);
  const remove = () => {
    hasRemoved = true;
    act("remove", { id });
  };
  item.append(
    button("edit", `Rename ${title}`, () => rename(item, id, title)),
    button("remove", `Delete ${title}`, remove),
  );
  return item;
}

function rename(item, id, title) {
  const field = make("input", { value: title, ariaLabel: "Name of the conversation" });
  let isOver = false;
  const end = (isKept) => {
    if (isOver) return; // a field that is removed loses the focus, too
    isOver = true;
    field.remove();
    if (isKept && field.value.trim() !== title) act("rename", { id, text: field.value });
    show();
    find(".open[aria-current]")?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
    event.stopPropagation();
  });
  field.addEventListener("blur", () => end(true));
  item.prepend(field);
  field.select();
}

function showNote(text, canUndo = false) {
  find(".note span").textContent = text;
  find("[data-do=undo]").hidden = !canUndo;
  clearTimeout(noting);
  if (text) noting = setTimeout(showNote, NOTE_MS, "");
}

function download(conversations) {
  const made = new Blob([JSON.stringify(conversations, null, 1)], { type: "application/json" });
  const href = URL.createObjectURL(made);
  make("a", { href, download: "hotcold-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(href), NOTE_MS);
}

function show() {
  const { rows, any, query, removed, number, note, file: kept } = newest;
  if (number && number !== told) {
    told = number;
    if (kept) download(kept);
    if (note) showNote(note);
    if (hasRemoved && removed) showNote(`Deleted “${removed}”`, true);
    hasRemoved = false;
  }
  if (find("li input")) return; // drawn when the name is written
  const place = [...element.querySelectorAll("li button")].indexOf(document.activeElement);
  find("ul").replaceChildren(...rows.map(row));
  if (place >= 0) element.querySelectorAll("li button")[place]?.focus();
  const none = any ? query && "No conversation has these words." : "What you ask is kept in this browser.";
  find(".none").textContent = rows.length ? "" : none;
  find("[data-do=export]").disabled = !any;
}

element.addEventListener("click", ({ target }) => {
  const what = target.closest("[data-do]")?.dataset.do;
  if (what === "undo") showNote("");
  if (what === "import") file.click();
  else if (what) act(what);
});
file.addEventListener("change", async () => {
  const text = await file.files[0]?.text();
  file.value = "";
  if (text) act("import", { text });
});
find("input[type=search]").addEventListener("input", ({ target }) => {
  clearTimeout(searching);
  searching = setTimeout(() => act("search", { text: target.value }), SEARCH_MS);
});
watch("value", () => {
  if (isOld(props.value)) return;
  newest = props.value;
  show();
});
show();
