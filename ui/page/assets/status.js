// The state of the open conversation: the whole page goes by it (`data-chat` of the body), and the
// line below the field says it in figures.
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

watch("value", show);
show();
