// The list of conversations: rows to open, rename and delete; a search; a file to keep or take over.
const SEARCH_MS = 150;
const find = (selector) => element.querySelector(selector);
const act = (what, more = {}) => trigger("act", { do: what, ...more });
const file = find("input[type=file]");
let searching = 0;
let given = 0; // the number of the last value with a file
let newest = props.value; // of all values: an older one may come later
const isOld = (value) => value.server === newest.server && value.at < newest.at;

function row({ id, title, name, busy }) {
  const open = make("button", { type: "button", className: "open", onclick: () => act("open", { id }) }, title);
  if (id === newest.open) open.ariaCurrent = "true";
  if (busy) open.append(make("span", { className: "sr" }, " (is being answered)"));
  const rename = () => {
    const text = prompt("Name of the conversation", name);
    if (text !== null && text !== name) act("rename", { id, text });
  };
  const remove = () => act("remove", { id });
  return make("li", {}, open, button("edit", `Rename ${title}`, rename), button("remove", `Delete ${title}`, remove));
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
  const place = [...element.querySelectorAll("li button")].indexOf(document.activeElement);
  find("ul").replaceChildren(...rows.map(row));
  if (place >= 0) element.querySelectorAll("li button")[place]?.focus();
  const none = any ? query && "No conversation has these words." : "What you ask is kept in this browser.";
  find(".none").textContent = rows.length ? "" : none;
  find("[data-do=export]").disabled = !any;
  Object.assign(find("[data-do=undo]"), { disabled: !removed, title: removed && `Bring back “${removed}”` });
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
