// The list of conversations: rows to open, rename and delete; a search; a file to keep or take over.
const SEARCH_MS = 150;
const find = (selector) => element.querySelector(selector);
const act = (what, more = {}) => trigger("act", { do: what, ...more });
const file = find("input[type=file]");
let searching = 0;
let pressed = false; // a row that is drawn again then loses its click
let given = 0; // the number of the last value with a file
let shown = ""; // what the list is drawn of
let newest = props.value; // of all values: an older one may come later
const isOld = (value) => value.server === newest.server && value.at < newest.at;

function row(item) {
  const { id, title, busy } = item;
  const open = make("button", { type: "button", className: "open", onclick: () => act("open", { id }) }, title);
  if (id === newest.open) open.ariaCurrent = "true";
  if (busy) open.append(make("span", { className: "sr" }, " (is being answered)"));
  const remove = () => act("remove", { id });
  const edit = button("edit", `Rename ${title}`, () => rename(item, open));
  return make("li", {}, open, edit, button("remove", `Delete ${title}`, remove));
}

// Enter gives the name, and so does leaving the field; Escape does not.
function rename({ id, name }, open) {
  const field = make("input", { value: name, ariaLabel: "Name of the conversation" });
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    if (event.key === "Escape") field.value = name;
    field.nextElementSibling.focus();
  });
  field.addEventListener("blur", () => {
    if (field.value !== name) act("rename", { id, text: field.value });
    setTimeout(() => field.replaceWith(open)); // once another element has the focus
    setTimeout(show);
  });
  open.replaceWith(field);
  field.focus();
  field.select();
}

function download(conversations) {
  const made = new Blob([JSON.stringify(conversations, null, 1)], { type: "application/json" });
  const href = URL.createObjectURL(made);
  make("a", { href, download: "hotcold-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

function show() {
  const { rows, any, query, removed, at, file: kept } = newest;
  if (kept && at !== given) {
    given = at;
    download(kept);
  }
  const state = JSON.stringify([rows, any, query, removed, newest.open]);
  if (pressed || state === shown || find("li input")) return;
  shown = state;
  const place = [...element.querySelectorAll("li button")].indexOf(document.activeElement);
  find("ul").replaceChildren(...rows.map(row));
  if (place >= 0) element.querySelectorAll("li button")[place]?.focus();
  const none = any ? query && "No conversation has these words." : "What you ask is kept in this browser.";
  const note = `${removed && `“${removed}” is deleted. `}${rows.length ? "" : none}`;
  if (find(".note").textContent !== note) find(".note").textContent = note; // else it would be read aloud again
  find("[data-do=export]").disabled = !any;
  Object.assign(find("[data-do=undo]"), { disabled: !removed, title: removed && `Bring back “${removed}”` });
}

element.addEventListener("pointerdown", () => (pressed = true));
for (const end of ["pointerup", "pointercancel"]) {
  document.addEventListener(end, () => {
    pressed = false;
    setTimeout(show);
  });
}
element.addEventListener("click", ({ target }) => {
  const what = target.closest("[data-do]")?.dataset.do;
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
