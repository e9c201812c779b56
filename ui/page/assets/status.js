// The state of the open conversation: the whole page goes by it (`data-chat` of the body), and the
// line below the field says it in figures.
const LOST = "The server has ended or cannot be reached: the answer broke off. Load the page again once it is back.";
const HINT = "Enter sends, Shift+Enter begins a new line.";

function show() {
  const { state, text, empty, refused } = props.value;
  const { dataset } = document.body;
  Object.assign(dataset, { chat: state, empty: empty ? "yes" : "no", refused: refused ? "yes" : "no" });
  const line = element.querySelector("p");
  line.textContent = text || HINT;
  line.classList.toggle("hint", !text);
  window.dispatchEvent(new Event("hotcold-state"));
}

// The server does not answer: nothing of what it had begun goes on. Its next word says how it is.
window.addEventListener("hotcold-lost", () => {
  const { dataset } = document.body;
  if (!["waiting", "answering"].includes(dataset.chat)) return;
  dataset.chat = "error";
  const line = element.querySelector("p");
  line.textContent = LOST;
  line.classList.remove("hint");
});

watch("value", show);
show();
