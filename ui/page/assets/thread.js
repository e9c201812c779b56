// The open conversation: its state, which the whole page goes by (`data-chat` of the body) and the
// line below the field tells in figures; buttons below each message; files of text for the field.
const GONE = "The server has ended or cannot be reached.";
const LOST = `${GONE.slice(0, -1)}: the answer broke off. Load the page again once it is back.`;
const HINT = "Enter sends, Shift+Enter begins a new line. Ctrl+K searches, Ctrl+Shift+O begins anew.";
const LARGEST_FILE = 256 * 1024; // bytes; few contexts hold more
const { dataset } = document.body;
const thread = element.closest("#main");
const line = element.querySelector("p");
let word = null; // the server's last one for the line; said again, it takes no notice's place

function show() {
  const { state, text, empty, refused } = props.value;
  Object.assign(dataset, { chat: state, empty: empty ? "yes" : "no", refused: refused ? "yes" : "no" });
  const said = JSON.stringify([state, text]);
  if (said !== word) tell(text);
  word = said;
  dress();
  window.dispatchEvent(new Event("hotcold-state"));
}

function tell(text) {
  line.textContent = text || HINT;
  line.classList.toggle("hint", !text);
}

// The server does not answer: nothing of what it had begun goes on. Its next word says how it is.
window.addEventListener("hotcold-lost", () => {
  const isAnswering = ["waiting", "answering"].includes(dataset.chat);
  if (isAnswering) dataset.chat = "error";
  else if (line.textContent === LOST) return;
  word = null;
  tell(isAnswering ? LOST : GONE);
});
window.addEventListener("hotcold-found", () => line.textContent === GONE && show());

// Browsers have no clipboard for pages that come over plain HTTP from elsewhere; this works for all.
function copy(text, made) {
  const field = make("textarea", { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  made.focus({ preventScroll: true });
  made.classList.add("glyph-done");
  setTimeout(() => made.classList.remove("glyph-done"), 1500);
}

// What is done with a message; `id` is of its conversation, which another may have replaced meanwhile.
function tools(row, id, index, { role, text, place, branches }, isLast) {
  const step = (by) => trigger("step", { id, index, place: place + by });
  const again = (written) => trigger("again", { id, index, text: written });
  const copied = button("copy", "Copy", () => copy(text, copied));
  const made = [copied, button("edit", "Edit", () => edit(row, role, text, again))];
  if (role === "assistant" || isLast) made.push(button("retry", "Retry", () => again(null)));
  if (branches > 1) {
    const [back, on] = [button("back", "Earlier branch", () => step(-1)), button("on", "Later branch", () => step(1))];
    [back.disabled, on.disabled] = [place === 0, place === branches - 1];
    made.unshift(back, make("span", {}, `${place + 1}/${branches}`), on);
  }
  return make("div", { className: "tools" }, ...made);
}

function edit(row, role, text, again) {
  const field = make("textarea", { value: text, ariaLabel: "Edit the message" });
  const cancel = make("button", { type: "button", onclick: () => end() }, "Cancel");
  const send = make("button", { className: "primary" }, role === "user" ? "Send" : "Save");
  const form = make("form", {}, field, make("div", {}, cancel, send));
  const end = () => {
    form.remove();
    row.querySelector(".glyph-edit")?.focus();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const written = field.value.trim();
    if (written && written !== text) again(written);
    end();
  });
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.isComposing) return;
    if (event.key === "Escape") end();
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    form.requestSubmit();
  });
  row.append(form);
  field.focus();
}

// Gradio paints a message's HTML again as it grows: what it lacks is put there each time. A text may
// have HTML of any class, with anything in it.
function dress() {
  const { messages, id } = props.value;
  thread.querySelectorAll(".message-row:not(.message-row *)").forEach((row, index, rows) => {
    const message = messages[index];
    const key = message ? JSON.stringify([message, id, rows.length]) : "";
    if ((row.dataset.key ?? "") === key) return;
    row.dataset.key = key;
    row.querySelectorAll(":scope > :is(.tools, form)").forEach((old) => old.remove());
    if (message) row.append(tools(row, id, index, message, index === messages.length - 1));
  });
  for (const code of thread.querySelectorAll(".code_wrap:not([data-language])")) {
    const [, language] = code.querySelector("code")?.className.match(/language-(\S+)/) ?? [];
    code.dataset.language = language ?? "text";
    code.querySelector("pre")?.setAttribute("tabindex", "0"); // it scrolls sideways
  }
  for (const table of thread.querySelectorAll("#chat table:not([tabindex])")) table.tabIndex = 0;
  for (const box of thread.querySelectorAll("input[type=checkbox]:not([aria-label])")) {
    box.ariaLabel = box.checked ? "done" : "to do";
  }
}

async function put(files) {
  const field = document.querySelector("#question textarea");
  for (const file of files) {
    const text = file.size > LARGEST_FILE ? null : await file.text();
    if (text === null || text.includes("\0") || text.includes("\ufffd")) {
      tell(text === null ? `${file.name} is larger than 256 kB.` : `${file.name} holds no text.`);
      continue;
    }
    const ticks = "`".repeat(Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)) + 1);
    const before = field.value.trim() ? `${field.value.trimEnd()}\n\n` : "";
    field.value = `${before}${file.name}:\n${ticks}\n${text.trimEnd()}\n${ticks}\n`;
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }
  field.focus();
}

const chooser = make("input", { type: "file", multiple: true, hidden: true, ariaLabel: "Files of text" });
chooser.addEventListener("change", async () => {
  await put([...chooser.files]);
  chooser.value = "";
});
element.append(chooser);
document.addEventListener("click", ({ target }) => target.closest("#attach") && chooser.click());

for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault(); // else the browser would open the file in the page's place
    event.stopPropagation();
    if (name === "dragleave" && event.relatedTarget) return; // it is still over the page
    dataset.drop = name === "dragover" ? "yes" : "no";
    if (name === "drop") put([...event.dataTransfer.files]);
  }, true);
}

new MutationObserver(dress).observe(thread, { childList: true, subtree: true });
watch("value", show);
show();
