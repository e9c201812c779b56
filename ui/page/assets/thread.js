// The open conversation: its state, which the whole page goes by (`data-chat` of the body) and the
// line below the field tells in figures; buttons below each message; files dropped into the field.
const LOST = "The server has ended or cannot be reached: the answer broke off. Load the page again once it is back.";
const HINT = "Enter sends, Shift+Enter begins a new line. Ctrl+K searches, Ctrl+Shift+O begins anew.";
const LARGEST_FILE = 256 * 1024; // bytes; few contexts hold more
const { dataset } = document.body;
const thread = element.closest("#main");
const line = element.querySelector("p");

function show() {
  const { state, text, empty, refused } = props.value;
  Object.assign(dataset, { chat: state, empty: empty ? "yes" : "no", refused: refused ? "yes" : "no" });
  tell(text);
  dress();
  window.dispatchEvent(new Event("hotcold-state"));
}

function tell(text) {
  line.textContent = text || HINT;
  line.classList.toggle("hint", !text);
}

// The server does not answer: nothing of what it had begun goes on. Its next word says how it is.
window.addEventListener("hotcold-lost", () => {
  if (!["waiting", "answering"].includes(dataset.chat)) return;
  dataset.chat = "error";
  tell(LOST);
});

function button(className, label, action) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", className, title: label });
  made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

async function copy(text, made) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers have no clipboard for pages that come over plain HTTP from elsewhere.
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  made.classList.add("done");
  setTimeout(() => made.classList.remove("done"), 1500);
}

function tools(row, index, { role, text, place, branches }, isLast) {
  const made = document.createElement("div");
  made.className = "tools";
  const step = (by) => trigger("step", { index, place: place + by });
  if (branches > 1) {
    const [back, on] = [button("back", "Earlier branch", () => step(-1)), button("on", "Later branch", () => step(1))];
    [back.disabled, on.disabled] = [place === 0, place === branches - 1];
    const count = document.createElement("span");
    count.textContent = `${place + 1}/${branches}`;
    made.append(back, count, on);
  }
  const copied = button("copy", "Copy", () => copy(text, copied));
  made.append(copied, button("edit", "Edit", () => edit(row, index, role, text)));
  if (role === "assistant" || isLast) made.append(button("retry", "Retry", () => trigger("again", { index, text: null })));
  return made;
}

function edit(row, index, role, text) {
  const form = document.createElement("form");
  const field = document.createElement("textarea");
  field.value = text;
  field.setAttribute("aria-label", "Edit the message");
  const send = button("primary", role === "user" ? "Send" : "Save", () => form.requestSubmit());
  const cancel = button("", "Cancel", () => end());
  for (const each of [cancel, send]) each.textContent = each.title;
  const end = () => {
    form.remove();
    row.classList.remove("edited");
    row.querySelector(".tools .edit")?.focus();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const written = field.value.trim();
    if (written && written !== text) trigger("again", { index, text: written });
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
  const buttons = document.createElement("div");
  buttons.append(cancel, send);
  form.append(field, buttons);
  row.classList.add("edited");
  row.append(form);
  field.focus();
}

// Gradio paints a message's HTML again as it grows: what it lacks is put there each time. A text may
// have HTML of any class, with anything in it.
function dress() {
  const { messages } = props.value;
  thread.querySelectorAll(".message-row:not(.message-row *)").forEach((row, index, rows) => {
    const message = messages[index];
    const key = message ? JSON.stringify([message, props.value.id, rows.length]) : "";
    if ((row.dataset.key ?? "") === key) return;
    row.dataset.key = key;
    row.querySelector(":scope > .tools")?.remove();
    row.querySelector(":scope > form")?.remove();
    row.classList.remove("edited");
    if (message) row.append(tools(row, index, message, index === messages.length - 1));
  });
  for (const code of thread.querySelectorAll(".code_wrap:not([data-language])")) {
    const [, language] = code.querySelector("code")?.className.match(/language-(\S+)/) ?? [];
    code.dataset.language = language ?? "text";
    code.querySelector("pre")?.setAttribute("tabindex", "0"); // it scrolls sideways
  }
  for (const table of thread.querySelectorAll("#chat table:not([tabindex])")) table.tabIndex = 0;
  for (const box of thread.querySelectorAll("input[type=checkbox]:not([aria-label])")) {
    box.setAttribute("aria-label", box.checked ? "done" : "to do");
  }
}

// A picture of another host is not fetched: its description stands in its place.
thread.addEventListener("error", ({ target }) => target.classList?.add("missing"), true);

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

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
const isOverMain = (event) => hasFiles(event) && event.target.closest?.("#main");
document.addEventListener("dragover", (event) => {
  if (hasFiles(event)) event.preventDefault(); // else the browser would open the file in the page's place
  dataset.drop = isOverMain(event) ? "yes" : "no";
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) dataset.drop = "no";
});
document.addEventListener("drop", (event) => {
  dataset.drop = "no";
  if (!hasFiles(event)) return;
  event.preventDefault();
  event.stopPropagation();
  if (isOverMain(event)) put([...event.dataTransfer.files]);
}, true);

new MutationObserver(dress).observe(thread, { childList: true, subtree: true });
watch("value", show);
show();
